// Protocol 1 in C++: every number that crosses the process border. docs/protocol.md is normative, wire/layout.py has
// the same in Python, and both are tested against the golden vectors in tests/golden.
#pragma once

#include <cstdint>

#include "shared_limits.h"

namespace pytriton {

constexpr char kMagic[8] = {'P', 'Y', 'T', 'R', 'I', 'T', 'O', 'N'};
constexpr uint16_t kMajor = 1;
constexpr uint16_t kMinor = 0;

// What a peer can do beyond the base of the protocol. A connection uses what both peers can do.
enum Capability : uint64_t {
  kCapDecoupled = 1u << 0,  // the worker may answer one request with any number of responses
  kCapCancel = 1u << 1,     // the worker reads CANCEL messages
  kCapCalls = 1u << 2,      // calls into the server, over a connection of their own
  kCapReschedule = 1u << 3,  // a response may be RESCHEDULE
  kCapExecuted = 1u << 4,  // the worker says when it can take the next batch: EXECUTED
  kCapContinues = 1u << 5,  // a response that is an error may be CONTINUES
  kCapAhead = 1u << 6,  // the worker may get its next batch before it has answered the current one
  kCapReferences = 1u << 7,  // a tensor of a response may be one of the inputs
  // the worker serves no batches; it only answers them with the reason why the model is not ready
  kCapStandsIn = 1u << 8,
  kCapPace = 1u << 9,  // the worker reads PAUSE and RESUME messages
  kCapAsleep = 1u << 10,  // the worker keeps the place of one that sleeps: it gets WAKE and no batches
  kCapTogether = 1u << 11,  // the worker may send response records of several batches together: RESPONSES
};
constexpr uint64_t kCapabilities =
    kCapDecoupled | kCapCancel | kCapCalls | kCapReschedule | kCapExecuted | kCapContinues | kCapAhead |
    kCapReferences | kCapStandsIn | kCapPace | kCapAsleep | kCapTogether;

enum class MessageType : uint16_t {
  kHello = 1,         // worker -> proxy: greeting
  kWelcome = 2,       // proxy -> worker: greeting
  kRefuse = 3,        // proxy -> worker: greeting whose text is the reason; the connection ends
  kSegment = 4,       // owner -> peer, with the memfd: a new segment of the sender's arena
  kSegmentClose = 5,  // owner -> peer: the segment will not be used again
  kBatch = 6,         // proxy -> worker: a batch record lies at (segment, offset, length)
  kResponse = 7,      // worker -> proxy: a response record lies at (segment, offset, length)
  kFail = 8,          // worker -> proxy: the whole batch failed; the reason is in the message
  kRelease = 9,       // peer -> owner: the block at (segment, offset) is free again
  kCancel = 10,       // proxy -> worker: request `index` of the batch is not wanted any more
  kDetach = 11,       // worker -> proxy: asks for no more batches; the proxy closes when all are answered
  // in place of a greeting: asks how many batches are in flight; also the answer, which ends the connection
  kActivity = 12,
  kCaller = 13,       // in place of HELLO, with the same greeting: this connection is for calls
  kCall = 14,         // worker -> proxy, in one: an operation, with a CallBody and a text; a batch record may lie there
  kResult = 15,       // proxy -> worker, in one: the call is done, and its value
  kExecuted = 16,     // worker -> proxy: the callable has returned from the batch, whether or not the batch is answered
  kPause = 17,  // proxy -> worker: the caller of request `index` does not read its responses: send no more for now
  kResume = 18,        // proxy -> worker: the caller reads them again
  kWake = 19,          // proxy -> worker that is asleep: a batch waits, and no worker is awake
  kResponses = 20,     // worker -> proxy: response records of several batches lie there, one behind the other
};

constexpr uint16_t kFlagInputReleased = 1u << 0;  // RESPONSE, FAIL, RESULT: the batch's input block is free again
constexpr uint16_t kFlagBatchDone = 1u << 1;      // RESPONSE, FAIL, RESULT: nothing more comes for this batch
constexpr uint16_t kFlagStream = 1u << 2;         // CALL of INFER: any number of responses may come
constexpr uint16_t kFlagExecuting = 1u << 3;      // RESPONSE, FAIL, with BATCH_DONE: EXECUTED is still to come

// What a CALL asks for; its `index`.
enum class Operation : uint32_t {
  kInfer = 1,
  kLoadModel = 2,
  kUnloadModel = 3,
  kModelReady = 4,
  kMetricFamily = 5,
  kMetric = 6,
  kMetricIncrement = 7,
  kMetricSet = 8,
  kMetricObserve = 9,
  kMetricValue = 10,
  kMetricDelete = 11,
  kMetricFamilyDelete = 12,
  kLog = 13,
  kReadiness = 14,
};

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

constexpr uint32_t kModelBatching = 1u << 0;
constexpr uint32_t kModelDecoupled = 1u << 1;

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

constexpr uint32_t kRequestSequenceStart = 1u << 0;
constexpr uint32_t kRequestSequenceEnd = 1u << 1;

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

constexpr uint32_t kResponseFinal = 1u << 0;  // nothing more comes for this request
constexpr uint32_t kResponseError = 1u << 1;
constexpr uint32_t kResponseEmpty = 1u << 2;  // no outputs: only ends the request (decoupled)
constexpr uint32_t kResponseReschedule = 1u << 3;  // no outputs: the request goes back to Triton's scheduler
constexpr uint32_t kResponseContinues = 1u << 4;  // with kResponseError: more comes for this request (decoupled)
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
