// Writes batch records and reads response records. Knows bytes, not Triton: tests and the fuzzer run it without a
// server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "../triton/devices.h"
#include "arena.h"
#include "protocol.h"

namespace pytriton {

// ---- what goes into a record: views on the caller's memory, collected first, written once ----------------------

struct Piece {
  const void* data;  // null if it lies on a device
  uint64_t size;
};

// Where a piece lies that is in the memory of a device.
struct DevicePiece {
  uint32_t piece;  // an index in RecordSource::pieces
  uint32_t request;
  int32_t device;
  const void* data;
};

struct TensorSource {
  std::string_view name;
  uint32_t dtype;
  uint32_t owner;
  uint32_t first_dim;  // an index in RecordSource::dims
  uint32_t dims_count;
  uint32_t first_piece;  // an index in RecordSource::pieces
  uint32_t piece_count;
  uint64_t length;  // of all its pieces
  bool in_place = false;  // its only piece is used where it lies, and its place in the record stays unused
};

struct ParameterSource {
  std::string_view key;
  uint32_t type;
  std::string_view text;  // of a string value
  uint64_t value;         // of any other
};

struct RequestSource {
  uint32_t rows = 1;
  uint32_t flags = 0;
  uint64_t priority = 0;
  uint64_t timeout_us = 0;
  uint64_t correlation_id = 0;
  std::string_view id;
  std::string_view correlation_string;
  std::string_view trace_context;
  uint32_t first_parameter = 0;  // an index in BatchSource::parameters
  uint32_t parameter_count = 0;
  uint32_t first_output = 0;  // an index in BatchSource::outputs
  uint32_t output_count = 0;
};

struct RecordSource {
  std::vector<TensorSource> tensors;
  std::vector<int64_t> dims;
  std::vector<Piece> pieces;
  std::vector<ParameterSource> parameters;
};

// The strings of one request in a tensor, which may also hold those of other requests.
struct StringsSource {
  uint32_t tensor;  // an index in RecordSource::tensors
  uint32_t request;
  uint64_t begin;  // an offset in the payload
  uint64_t length;
  uint64_t count;  // how many strings the shape of the request announces
};

struct BatchSource : RecordSource {
  std::vector<RequestSource> requests;
  std::vector<std::string_view> outputs;
  std::vector<StringsSource> strings;
  std::vector<DevicePiece> device_pieces;

  void Clear();
};

// One response, to which all tensors and parameters belong.
struct ResponseSource : RecordSource {
  uint32_t flags = 0;
  uint32_t error_code = 0;
  std::string_view error;
};

struct BatchLayout {
  uint64_t metadata_length = 0;
  uint64_t record_length = 0;
  uint64_t written_length = 0;  // what `WriteBatch` writes of it: everything but the tensors that stay in place
};

// Returns false with the reason if the record would exceed the limits of the protocol.
bool LayoutBatch(const BatchSource& source, BatchLayout* layout, std::string* error);

// Writes `layout.written_length` bytes to `out`, which is aligned to kAlignment. The time of sending stays 0. Pieces on
// devices are left out; `CopiesOf` lists them.
void WriteBatch(
    const BatchSource& source, const BatchLayout& layout, uint64_t batch, uint64_t received_ns, uint8_t* out);

// Lists the copies from devices that complete a written record.
std::vector<DeviceCopy> CopiesOf(const BatchSource& source, const BatchLayout& layout, uint8_t* record);

// Calls `refuse(request, reason)` for each request whose strings are not exactly those that its shape announces, so
// that no length reaches into the data of another request. It reads the written record and not its source, because
// callers may change their shared memory at any time.
void CheckStrings(
    const BatchSource& source, const BatchLayout& layout, const uint8_t* record,
    const std::function<void(uint32_t, const std::string&)>& refuse);

// The same for a response record. A text ends at its first zero byte, as it does for its readers.
bool LayoutResponse(const ResponseSource& source, BatchLayout* layout, std::string* error);
void WriteResponse(const ResponseSource& source, const BatchLayout& layout, uint64_t batch, uint8_t* out);

// Sets the time of sending in a record that WriteBatch has written.
inline void StampSent(uint8_t* record, uint64_t sent_ns) {
  reinterpret_cast<RecordHeader*>(record)->sent_ns = sent_ns;
}

// The offset of a request's cancellation byte in a record that WriteBatch has written.
inline uint64_t CancelledOffset(uint32_t request) {
  return sizeof(RecordHeader) + uint64_t{request} * sizeof(RequestEntry) + offsetof(RequestEntry, cancelled);
}

// ---- what comes out of the record of a peer ---------------------------------------------------------------------

struct RecordTensor {
  const char* name;  // ends with a zero byte
  uint32_t dtype;
  uint32_t owner;
  const int64_t* dims;
  uint32_t dims_count;
  const uint8_t* payload;
  uint64_t payload_length;
};

struct RecordParameter {
  const char* key;
  uint32_t type;
  const char* text;  // ends with a zero byte
  uint64_t value;
};

// A record that a peer has written. The peer may change its arena at any time, so metadata are copied before they are
// checked; payloads are copied or handed on, and never trusted.
class PeerRecord {
 public:
  const std::vector<RecordTensor>& tensors() const { return tensors_; }

 protected:
  bool ReadHeader(
      const uint8_t* block, uint64_t length, uint32_t magic, uint64_t batch, RecordHeader* header, std::string* error);
  bool CheckString(StringRef ref, const char* what, std::string* error) const;
  template <typename T>
  bool CheckTable(uint64_t offset, uint64_t count, const char* what, std::string* error) const;
  bool CheckParameters(uint32_t offset, uint32_t count, std::string* error) const;
  // Reads the tensors of `owners` entries. `rows` is what the tensors over the whole batch must have, or null for any
  // shape. `batch` is the record whose inputs they may refer to, or null if they may not.
  bool ReadTensors(
      const uint8_t* block, const RecordHeader& header, const char* what, size_t owners, const uint64_t* rows,
      const uint8_t* const* payloads, const Block* batch, std::string* error);
  const char* Text(StringRef ref) const { return reinterpret_cast<const char*>(metadata_.data()) + ref.offset; }
  void ReadParameters(uint32_t offset, uint32_t count, std::vector<RecordParameter>* out) const;

  std::vector<uint8_t> metadata_;
  std::vector<RecordTensor> tensors_;
};

class ResponseRecord : public PeerRecord {
 public:
  // `block` has `length` readable bytes; `decoupled` allows several responses to a request. For a peer in this process,
  // `payloads` has the address of each tensor's payload that does not lie in the block, otherwise 0; it may be null.
  // `inputs` is the block of the batch if the peer's tensors may refer to it.
  bool Parse(
      const uint8_t* block, uint64_t length, uint64_t batch, uint32_t request_count, bool decoupled,
      std::string* error, const uint8_t* const* payloads = nullptr, const Block* inputs = nullptr);

  const std::vector<ResponseEntry>& entries() const { return entries_; }
  std::string_view ErrorText(const ResponseEntry& entry) const;
  void Parameters(const ResponseEntry& entry, std::vector<RecordParameter>* out) const;

 private:
  std::vector<ResponseEntry> entries_;
};

// The one request of a call.
class CallRecord : public PeerRecord {
 public:
  bool Parse(const uint8_t* block, uint64_t length, uint64_t call, std::string* error);

  const RequestEntry& entry() const { return entry_; }
  const char* id() const { return Text(entry_.id); }
  const char* correlation_string() const { return Text(entry_.correlation_string); }
  std::vector<RecordParameter> Parameters() const;
  std::vector<const char*> Outputs() const;

 private:
  RequestEntry entry_{};
};

// Describes what is wrong with a BYTES payload that must hold exactly `count` elements (length, then data); "" if it is
// right. `decode_strings` in wire/strings.py has the same texts.
std::string WrongStrings(const uint8_t* payload, uint64_t length, uint64_t count);

// Cuts a BYTES payload (length, then data) into parts of `counts[i]` elements. `ends[i]` is set to the offset behind
// part i. Returns false if the payload does not hold exactly these elements.
bool SplitStrings(
    const uint8_t* payload, uint64_t length, const std::vector<uint64_t>& counts, std::vector<uint64_t>* ends);

// Whether a tensor has as many bytes as its shape and type say, and for BYTES as many strings; otherwise `error` says
// what was expected. Strings at a null address are not checked.
bool FitsShape(
    uint32_t dtype, const int64_t* dims, uint64_t dims_count, const uint8_t* data, uint64_t length, std::string* error);

}  // namespace pytriton
