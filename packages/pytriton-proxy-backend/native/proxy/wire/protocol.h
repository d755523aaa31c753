// Protocol 1 in C++: every number that crosses the process border, those that have names in shared_layout.h.
// docs/protocol.md is normative, wire/layout.py has the same in Python, and both are tested against the golden vectors
// in tests/golden.
#pragma once

#include <cstdint>

#include "shared_layout.h"
#include "shared_limits.h"

namespace pytriton {

constexpr char kMagic[8] = {'P', 'Y', 'T', 'R', 'I', 'T', 'O', 'N'};
constexpr uint16_t kMajor = 1;
constexpr uint16_t kMinor = 0;

struct Message {
  uint16_t type;
  uint16_t flags;
  uint32_t size;      // bytes of the whole packet
  uint64_t batch;     // in ACTIVITY of the proxy: how many batches there were
  // in BATCH and RELEASE of the proxy: how many RESPONSE messages of this connection it has read completely
  uint64_t consumed;
  uint32_t segment;
  uint32_t index;     // CANCEL: request; FAIL: Triton's error code
  uint64_t offset;
  uint64_t length;    // in ACTIVITY of the proxy: batches in flight
};
static_assert(sizeof(Message) == 48);

// Follows the header of HELLO, WELCOME and REFUSE; `text_length` bytes of UTF-8 follow it. The first twelve bytes mean
// the same in every future version. A longer greeting is read as far as it is known.
struct Greeting {
  char magic[8];
  uint16_t major;
  uint16_t minor;
  uint32_t pid;
  uint32_t uid;
  uint32_t max_in_flight;  // HELLO: batches that the worker takes at once; WELCOME: what the proxy will use
  uint64_t capabilities;
  uint32_t model_flags;    // WELCOME: kModelBatching | kModelDecoupled
  uint32_t text_length;    // HELLO: the worker's name; WELCOME: the model's name; REFUSE: the reason
  uint64_t model_version;  // WELCOME
  uint64_t arena_budget;   // WELCOME: bytes per direction
  uint64_t arena_idle_ms;  // WELCOME: unused segments go back after so long
  uint64_t execution_timeout_ms;  // WELCOME: how long a batch may take; 0: as long as it likes
};
static_assert(sizeof(Greeting) == 72);

// Follows the header of CALL; the rest of the packet is a text.
struct CallBody {
  int64_t subject;        // INFER, MODEL_READY: the model's version; of a metric: its number; see docs/protocol.md
  double value;           // of an operation on a metric
  // INFER: the batch with the request for which this call is made, so that both share a trace; 0 for none
  uint64_t parent_batch;
  uint32_t parent_request;
  uint8_t reserved[4];
};
static_assert(sizeof(CallBody) == 32);

constexpr uint32_t kMaxPacket = 4096;  // no packet is larger
constexpr uint32_t kMaxText = kMaxPacket - sizeof(Message) - sizeof(Greeting);

// ---- records in an arena -------------------------------------------------------------------------------------

constexpr uint64_t kAlignment = 64;               // of blocks and of payloads in them
constexpr uint64_t kMaxMetadata = 1u << 30;       // bytes of a record before its payloads
constexpr uint32_t kBatchMagic = 0x31425450;      // "PTB1"
constexpr uint32_t kResponseMagic = 0x31525450;   // "PTR1"
constexpr uint32_t kWholeBatch = 0xFFFFFFFF;      // TensorEntry::owner

struct RecordHeader {
  uint32_t magic;
  uint32_t entry_count;      // requests or responses
  uint32_t tensor_count;
  uint32_t reserved;
  uint64_t batch;
  uint64_t metadata_length;  // this header, the entries, shapes, strings: all before the first payload
  uint64_t record_length;    // metadata and payloads
  uint32_t entries_offset;   // all offsets count from the start of the record
  uint32_t tensors_offset;
  // CLOCK_MONOTONIC in nanoseconds; 0 in a response record.
  uint64_t received_ns;  // when the proxy got the batch from Triton
  uint64_t sent_ns;      // when it handed it to the worker
};
static_assert(sizeof(RecordHeader) == 64);

struct StringRef {
  uint32_t offset;
  uint32_t length;
};

struct RequestEntry {
  uint32_t rows;   // of the batch axis; 1 where the model does not batch
  uint32_t flags;  // kRequestSequence*
  uint64_t priority;
  uint64_t timeout_us;
  uint64_t correlation_id;
  StringRef id;
  StringRef correlation_string;
  StringRef trace_context;
  uint32_t parameters_offset;
  uint32_t parameters_count;
  uint32_t outputs_offset;  // StringRef[outputs_count]: the names that the caller asked for
  uint32_t outputs_count;
  uint8_t cancelled;        // the proxy sets it while the batch is in flight; everything else is constant
  uint8_t reserved[7];
};
static_assert(sizeof(RequestEntry) == 80);

// Entries with one of these flags have no rows in the tensors over the whole batch.
constexpr uint32_t kResponseNothing = kResponseError | kResponseEmpty | kResponseReschedule;

struct ResponseEntry {
  uint32_t request;  // its place in the batch
  uint32_t flags;    // kResponse*
  uint32_t rows;     // of the whole-batch tensors of this record
  uint32_t error_code;
  StringRef error;
  uint32_t parameters_offset;
  uint32_t parameters_count;
  uint64_t reserved[2];
};
static_assert(sizeof(ResponseEntry) == 48);

struct TensorEntry {
  StringRef name;
  uint32_t dtype;  // Triton's TRITONSERVER_DataType
  uint32_t dims_count;
  uint32_t owner;  // the request (or response of this record) that it belongs to, or kWholeBatch
  uint32_t dims_offset;  // int64[dims_count]
  uint64_t payload_offset;
  uint64_t payload_length;
  uint64_t source;  // kSource*: what the offset counts from
};
static_assert(sizeof(TensorEntry) == 48);

constexpr uint64_t kSourceRecord = 0;
constexpr uint64_t kSourceBatch = 1;  // the record of the batch that is answered; with kCapReferences

struct ParameterEntry {
  StringRef key;
  uint32_t type;    // Triton's TRITONSERVER_ParameterType
  uint32_t length;  // of a string value
  uint64_t value;   // a string's offset; the bits of an int64 or double; 0 or 1
};
static_assert(sizeof(ParameterEntry) == 24);

// Bytes of one element, 0 for a type that is not fixed in size or not known.
inline uint32_t FixedElementSize(uint32_t dtype) {
  return dtype < sizeof(kElementSizes) ? kElementSizes[dtype] : 0;
}

}  // namespace pytriton
