#include "record.h"

#include <cstring>
#include <iterator>

namespace pytriton {

namespace {

constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }

// Lays strings and tables one after the other into the metadata of a record.
class Cursor {
 public:
  Cursor(uint8_t* base, uint64_t start) : base_(base), at_(start) {}

  template <typename T>
  uint32_t Table(uint64_t count, T** table) {
    at_ = AlignUp(at_, 8);
    const uint64_t offset = at_;
    *table = reinterpret_cast<T*>(base_ + offset);
    at_ += count * sizeof(T);
    return static_cast<uint32_t>(offset);
  }

  StringRef String(std::string_view text) {
    const StringRef ref{static_cast<uint32_t>(at_), static_cast<uint32_t>(text.size())};
    // the pointer of an empty view may be invalid
    if (!text.empty()) std::memcpy(base_ + at_, text.data(), text.size());
    base_[at_ + text.size()] = 0;
    at_ += text.size() + 1;
    return ref;
  }

 private:
  uint8_t* base_;
  uint64_t at_;
};

}  // namespace

void BatchSource::Clear() {
  requests.clear();
  tensors.clear();
  dims.clear();
  pieces.clear();
  parameters.clear();
  outputs.clear();
  strings.clear();
  device_pieces.clear();
}

namespace {

// Computes the size of the tables and texts that all records have, and places the payloads behind `metadata`.
bool FinishLayout(
    const RecordSource& source, const char* what, uint64_t metadata, BatchLayout* layout, std::string* error) {
  metadata += source.tensors.size() * sizeof(TensorEntry) + source.dims.size() * sizeof(int64_t) +
              source.parameters.size() * sizeof(ParameterEntry);
  for (const auto& tensor : source.tensors) metadata += tensor.name.size() + 1;
  for (const auto& parameter : source.parameters) metadata += parameter.key.size() + parameter.text.size() + 2;
  metadata = AlignUp(metadata, kAlignment);
  if (metadata > kMaxMetadata) {
    *error = std::string("the metadata of the ") + what + " (ids, parameters, names) take " +
             std::to_string(metadata) + " bytes, the protocol allows " + std::to_string(kMaxMetadata);
    return false;
  }
  uint64_t total = metadata;
  for (const bool in_place : {false, true}) {
    for (const auto& tensor : source.tensors) {
      if (tensor.in_place != in_place) continue;
      uint64_t next;
      if (__builtin_add_overflow(total, tensor.length, &next) || next > UINT64_MAX - kAlignment) {
        *error = std::string("the tensors of the ") + what + " are larger than 64 bits can count";
        return false;
      }
      total = AlignUp(next, kAlignment);
    }
    if (!in_place) layout->written_length = total;
  }
  layout->metadata_length = metadata;
  layout->record_length = total;
  return true;
}

RecordHeader MakeHeader(uint32_t magic, uint64_t batch, size_t entries, size_t tensors, const BatchLayout& layout) {
  RecordHeader header{};
  header.magic = magic;
  header.entry_count = static_cast<uint32_t>(entries);
  header.tensor_count = static_cast<uint32_t>(tensors);
  header.batch = batch;
  header.metadata_length = layout.metadata_length;
  header.record_length = layout.record_length;
  return header;
}

void WriteParameters(const RecordSource& source, Cursor* cursor, ParameterEntry* parameters) {
  for (size_t i = 0; i < source.parameters.size(); ++i) {
    const auto& from = source.parameters[i];
    auto& to = parameters[i];
    to.key = cursor->String(from.key);
    const StringRef text = cursor->String(from.text);
    to.type = from.type;
    to.length = text.length;
    to.value = from.type == 0 ? text.offset : from.value;
  }
}

void WriteTensors(
    const RecordSource& source, const BatchLayout& layout, uint32_t dims_offset, Cursor* cursor, TensorEntry* tensors,
    uint8_t* out) {
  uint64_t payload = layout.metadata_length;
  uint64_t in_place = layout.written_length;
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    const auto& from = source.tensors[i];
    auto& to = tensors[i];
    to = TensorEntry{};
    to.name = cursor->String(from.name);
    to.dtype = from.dtype;
    to.dims_count = from.dims_count;
    to.owner = from.owner;
    to.dims_offset = dims_offset + from.first_dim * sizeof(int64_t);
    to.payload_length = from.length;
    if (from.in_place) {
      to.payload_offset = in_place;
      in_place = AlignUp(in_place + from.length, kAlignment);
      continue;
    }
    to.payload_offset = payload;
    uint8_t* at = out + payload;
    for (uint32_t p = from.first_piece; p < from.first_piece + from.piece_count; ++p) {
      const Piece& piece = source.pieces[p];
      if (piece.data != nullptr) std::memcpy(at, piece.data, piece.size);
      at += piece.size;
    }
    payload = AlignUp(payload + from.length, kAlignment);
  }
}

}  // namespace

bool LayoutBatch(const BatchSource& source, BatchLayout* layout, std::string* error) {
  uint64_t metadata = sizeof(RecordHeader) + source.requests.size() * sizeof(RequestEntry) +
                      source.outputs.size() * sizeof(StringRef);
  for (const auto& request : source.requests) {
    metadata += request.id.size() + request.correlation_string.size() + request.trace_context.size() + 3;
  }
  for (const auto& output : source.outputs) metadata += output.size() + 1;
  return FinishLayout(source, "batch", metadata, layout, error);
}

void WriteBatch(
    const BatchSource& source, const BatchLayout& layout, uint64_t batch, uint64_t received_ns, uint8_t* out) {
  Cursor cursor(out, sizeof(RecordHeader));
  RequestEntry* requests;
  TensorEntry* tensors;
  int64_t* dims;
  ParameterEntry* parameters;
  StringRef* outputs;
  // The padding before the payloads is cleared, because workers compare the metadata of batches byte by byte.
  std::memset(out + layout.metadata_length - kAlignment, 0, kAlignment);
  auto* header = reinterpret_cast<RecordHeader*>(out);
  *header = MakeHeader(kBatchMagic, batch, source.requests.size(), source.tensors.size(), layout);
  header->received_ns = received_ns;
  header->entries_offset = cursor.Table(source.requests.size(), &requests);
  header->tensors_offset = cursor.Table(source.tensors.size(), &tensors);
  const uint32_t dims_offset = cursor.Table(source.dims.size(), &dims);
  const uint32_t parameters_offset = cursor.Table(source.parameters.size(), &parameters);
  const uint32_t outputs_offset = cursor.Table(source.outputs.size(), &outputs);

  if (!source.dims.empty()) std::memcpy(dims, source.dims.data(), source.dims.size() * sizeof(int64_t));
  for (size_t i = 0; i < source.outputs.size(); ++i) outputs[i] = cursor.String(source.outputs[i]);
  WriteParameters(source, &cursor, parameters);
  for (size_t i = 0; i < source.requests.size(); ++i) {
    const auto& from = source.requests[i];
    auto& to = requests[i];
    to = RequestEntry{};
    to.rows = from.rows;
    to.flags = from.flags;
    to.priority = from.priority;
    to.timeout_us = from.timeout_us;
    to.correlation_id = from.correlation_id;
    to.id = cursor.String(from.id);
    to.correlation_string = cursor.String(from.correlation_string);
    to.trace_context = cursor.String(from.trace_context);
    to.parameters_offset = parameters_offset + from.first_parameter * sizeof(ParameterEntry);
    to.parameters_count = from.parameter_count;
    to.outputs_offset = outputs_offset + from.first_output * sizeof(StringRef);
    to.outputs_count = from.output_count;
  }
  WriteTensors(source, layout, dims_offset, &cursor, tensors, out);
}

std::vector<DeviceCopy> CopiesOf(const BatchSource& source, const BatchLayout& layout, uint8_t* record) {
  std::vector<DeviceCopy> copies;
  uint64_t payload = layout.metadata_length;
  auto found = source.device_pieces.begin();
  for (const auto& tensor : source.tensors) {
    if (tensor.in_place) continue;
    uint8_t* at = record + payload;
    for (uint32_t p = tensor.first_piece; p < tensor.first_piece + tensor.piece_count; ++p) {
      const uint64_t size = source.pieces[p].size;
      if (found != source.device_pieces.end() && found->piece == p) {
        copies.push_back({tensor.name, false, at, found->data, size, found->device, found->request});
        ++found;
      }
      at += size;
    }
    payload = AlignUp(payload + tensor.length, kAlignment);
  }
  return copies;
}

void CheckStrings(
    const BatchSource& source, const BatchLayout& layout, const uint8_t* record,
    const std::function<void(uint32_t, const std::string&)>& refuse) {
  uint64_t payload = layout.metadata_length;
  uint32_t place = 0;  // the tensor whose payload begins there
  for (const auto& strings : source.strings) {
    const auto& tensor = source.tensors[strings.tensor];
    for (; place < strings.tensor; ++place) {
      if (!source.tensors[place].in_place) payload = AlignUp(payload + source.tensors[place].length, kAlignment);
    }
    const uint8_t* begin = tensor.in_place ? static_cast<const uint8_t*>(source.pieces[tensor.first_piece].data)
                                           : record + payload;
    const std::string wrong = WrongStrings(begin + strings.begin, strings.length, strings.count);
    if (!wrong.empty()) refuse(strings.request, "input '" + std::string(tensor.name) + "': " + wrong);
  }
}

bool LayoutResponse(const ResponseSource& source, BatchLayout* layout, std::string* error) {
  return FinishLayout(
      source, "response", sizeof(RecordHeader) + sizeof(ResponseEntry) + source.error.size() + 1, layout, error);
}

void WriteResponse(const ResponseSource& source, const BatchLayout& layout, uint64_t batch, uint8_t* out) {
  Cursor cursor(out, sizeof(RecordHeader));
  ResponseEntry* entry;
  TensorEntry* tensors;
  int64_t* dims;
  ParameterEntry* parameters;
  std::memset(out + layout.metadata_length - kAlignment, 0, kAlignment);
  auto* header = reinterpret_cast<RecordHeader*>(out);
  *header = MakeHeader(kResponseMagic, batch, 1, source.tensors.size(), layout);
  header->entries_offset = cursor.Table(1, &entry);
  header->tensors_offset = cursor.Table(source.tensors.size(), &tensors);
  const uint32_t dims_offset = cursor.Table(source.dims.size(), &dims);
  *entry = ResponseEntry{};
  entry->parameters_offset = cursor.Table(source.parameters.size(), &parameters);
  entry->parameters_count = static_cast<uint32_t>(source.parameters.size());
  entry->flags = source.flags;
  entry->error_code = source.error_code;
  if (!source.dims.empty()) std::memcpy(dims, source.dims.data(), source.dims.size() * sizeof(int64_t));
  entry->error = cursor.String(source.error);
  WriteParameters(source, &cursor, parameters);
  WriteTensors(source, layout, dims_offset, &cursor, tensors, out);
}

// ---- what a peer has written -------------------------------------------------------------------------------------

bool PeerRecord::CheckString(StringRef ref, const char* what, std::string* error) const {
  const uint64_t end = uint64_t{ref.offset} + ref.length;
  if (ref.offset < sizeof(RecordHeader) || end >= metadata_.size() || metadata_[end] != 0 ||
      std::memchr(metadata_.data() + ref.offset, 0, ref.length) != nullptr) {
    *error = std::string(what) + " at offset " + std::to_string(ref.offset) + ", length " +
             std::to_string(ref.length) + ", is not a zero-terminated string inside the " +
             std::to_string(metadata_.size()) + " bytes of metadata";
    return false;
  }
  return true;
}

template <typename T>
bool PeerRecord::CheckTable(uint64_t offset, uint64_t count, const char* what, std::string* error) const {
  if (count == 0) return true;
  if (offset % 8 != 0 || offset < sizeof(RecordHeader) || offset > metadata_.size() ||
      count > (metadata_.size() - offset) / sizeof(T)) {
    *error = std::string("the table of ") + what + " at offset " + std::to_string(offset) + " with " +
             std::to_string(count) + " entries does not lie inside the " + std::to_string(metadata_.size()) +
             " bytes of metadata";
    return false;
  }
  return true;
}

bool PeerRecord::ReadHeader(
    const uint8_t* block, uint64_t length, uint32_t magic, uint64_t batch, RecordHeader* header, std::string* error) {
  tensors_.clear();
  if (length < sizeof(*header)) {
    *error = "a record of " + std::to_string(length) + " bytes is shorter than its header";
    return false;
  }
  std::memcpy(header, block, sizeof(*header));
  if (header->magic != magic || header->batch != batch) {
    *error = "the record is not that of batch " + std::to_string(batch) + ": magic " + std::to_string(header->magic) +
             ", batch " + std::to_string(header->batch);
    return false;
  }
  if (header->metadata_length < sizeof(*header) || header->metadata_length > kMaxMetadata ||
      header->metadata_length > header->record_length || header->record_length > length) {
    *error = "lengths do not nest: metadata " + std::to_string(header->metadata_length) + ", record " +
             std::to_string(header->record_length) + ", block " + std::to_string(length);
    return false;
  }
  metadata_.resize(header->metadata_length);
  std::memcpy(metadata_.data(), block, header->metadata_length);
  return true;
}

bool PeerRecord::CheckParameters(uint32_t offset, uint32_t count, std::string* error) const {
  if (!CheckTable<ParameterEntry>(offset, count, "parameters", error)) return false;
  for (uint32_t i = 0; i < count; ++i) {
    ParameterEntry parameter;
    std::memcpy(&parameter, metadata_.data() + offset + i * sizeof(parameter), sizeof(parameter));
    if (!CheckString(parameter.key, "a parameter's name", error)) return false;
    if (parameter.type == 0) {
      if (parameter.value > UINT32_MAX ||
          !CheckString({static_cast<uint32_t>(parameter.value), parameter.length}, "a parameter's value", error)) {
        if (error->empty()) *error = "a parameter's value lies outside the metadata";
        return false;
      }
    } else if (parameter.type > kLastParameterType) {
      *error = "unknown parameter type " + std::to_string(parameter.type);
      return false;
    }
  }
  return true;
}

namespace {

// The checks of a tensor in a record. Each returns false with the reason.

bool CheckKind(const TensorEntry& entry, size_t owners, std::string* error) {
  if (entry.owner != kWholeBatch && entry.owner >= owners) {
    *error = "belongs to entry " + std::to_string(entry.owner) + " of " + std::to_string(owners);
    return false;
  }
  if (entry.dtype == kBytesType || FixedElementSize(entry.dtype) != 0) return true;
  *error = "unknown data type " + std::to_string(entry.dtype);
  return false;
}

bool CheckShape(const TensorEntry& entry, const int64_t* dims, std::string* error) {
  uint64_t elements = 1;
  for (uint32_t d = 0; d < entry.dims_count; ++d) {
    if (dims[d] < 0 || __builtin_mul_overflow(elements, static_cast<uint64_t>(dims[d]), &elements)) {
      *error = "dimension " + std::to_string(dims[d]) + " is negative or too large";
      return false;
    }
  }
  if (entry.dtype == kBytesType) return true;
  uint64_t bytes = 0;
  if (!__builtin_mul_overflow(elements, uint64_t{FixedElementSize(entry.dtype)}, &bytes) &&
      bytes == entry.payload_length) {
    return true;
  }
  *error = "its shape and type take " + std::to_string(bytes) + " bytes, its payload has " +
           std::to_string(entry.payload_length);
  return false;
}

// `refers`: the payload lies in the inputs of the batch.
bool CheckSource(const TensorEntry& entry, bool refers, std::string* error) {
  const bool strings = entry.dtype == kBytesType;
  if (!refers || (!strings && entry.source == kSourceBatch)) return true;
  *error = (strings ? std::string("strings are") : "source " + std::to_string(entry.source) + " is") +
           " nothing that a tensor can refer to";
  return false;
}

bool CheckPlace(const TensorEntry& entry, uint64_t begin, uint64_t end, bool refers, std::string* error) {
  if (entry.payload_offset >= begin && entry.payload_offset <= end &&
      entry.payload_length <= end - entry.payload_offset) {
    return true;
  }
  *error = "its payload of " + std::to_string(entry.payload_length) + " bytes at " +
           std::to_string(entry.payload_offset) + " does not lie between " + std::to_string(begin) + " and " +
           std::to_string(end) + (refers ? " of its batch" : ", behind the metadata of the record");
  return false;
}

// `rows` are the rows of the responses of a whole batch; null if the tensor belongs to one response.
bool CheckRows(const TensorEntry& entry, const int64_t* dims, const uint64_t* rows, std::string* error) {
  if (rows == nullptr || entry.owner != kWholeBatch) return true;
  if (entry.dims_count != 0 && static_cast<uint64_t>(dims[0]) == *rows) return true;
  *error = "has " + (entry.dims_count == 0 ? std::string("no") : std::to_string(dims[0])) +
           " rows for the whole batch, its responses have " + std::to_string(*rows);
  return false;
}

}  // namespace

bool PeerRecord::ReadTensors(
    const uint8_t* block, const RecordHeader& header, const char* what, size_t owners, const uint64_t* rows,
    const uint8_t* const* payloads, const Block* batch, std::string* error) {
  if (!CheckTable<TensorEntry>(header.tensors_offset, header.tensor_count, "tensors", error)) return false;
  const uint8_t* base = metadata_.data();
  tensors_.reserve(header.tensor_count);
  for (uint32_t i = 0; i < header.tensor_count; ++i) {
    TensorEntry entry;
    std::memcpy(&entry, base + header.tensors_offset + i * sizeof(entry), sizeof(entry));
    if (!CheckString(entry.name, "a tensor's name", error)) return false;
    const auto explain = [&] {
      *error = std::string(what) + " '" + Text(entry.name) + "': " + *error;
      return false;
    };
    if (!CheckKind(entry, owners, error)) return explain();
    if (!CheckTable<int64_t>(entry.dims_offset, entry.dims_count, "dimensions", error)) return false;
    const auto* dims = reinterpret_cast<const int64_t*>(base + entry.dims_offset);
    const bool refers = batch != nullptr && entry.source != kSourceRecord;
    const uint64_t begin = refers ? 0 : header.metadata_length;
    const uint64_t end = refers ? batch->length : header.record_length;
    if (!CheckShape(entry, dims, error) || !CheckSource(entry, refers, error) ||
        !CheckPlace(entry, begin, end, refers, error) || !CheckRows(entry, dims, rows, error)) {
      return explain();
    }
    const uint8_t* payload = (refers ? batch->data : block) + entry.payload_offset;
    if (payloads != nullptr && payloads[i] != nullptr) payload = payloads[i];
    tensors_.push_back({Text(entry.name), entry.dtype, entry.owner, dims, entry.dims_count, payload,
                        entry.payload_length});
  }
  return true;
}

void PeerRecord::ReadParameters(uint32_t offset, uint32_t count, std::vector<RecordParameter>* out) const {
  out->clear();
  for (uint32_t i = 0; i < count; ++i) {
    ParameterEntry parameter;
    std::memcpy(&parameter, metadata_.data() + offset + i * sizeof(parameter), sizeof(parameter));
    const char* text = parameter.type == 0 ? Text({static_cast<uint32_t>(parameter.value), 0}) : "";
    out->push_back({Text(parameter.key), parameter.type, text, parameter.value});
  }
}

bool ResponseRecord::Parse(
    const uint8_t* block, uint64_t length, uint64_t batch, uint32_t request_count, bool decoupled,
    std::string* error, const uint8_t* const* payloads, const Block* inputs) {
  entries_.clear();
  RecordHeader header;
  if (!ReadHeader(block, length, kResponseMagic, batch, &header, error) ||
      !CheckTable<ResponseEntry>(header.entries_offset, header.entry_count, "responses", error)) {
    return false;
  }
  entries_.resize(header.entry_count);
  if (header.entry_count != 0) {
    std::memcpy(
        entries_.data(), metadata_.data() + header.entries_offset, header.entry_count * sizeof(ResponseEntry));
  }
  uint64_t rows = 0;
  std::vector<bool> seen(request_count);
  for (const auto& entry : entries_) {
    if (entry.request >= request_count) {
      *error = "response to request " + std::to_string(entry.request) + " of a batch of " +
               std::to_string(request_count);
      return false;
    }
    if (!decoupled && seen[entry.request]) {
      *error = "two responses to request " + std::to_string(entry.request) + " of a model that is not decoupled";
      return false;
    }
    seen[entry.request] = true;
    if ((entry.flags & kResponseNothing) == 0) rows += entry.rows;
    if ((entry.flags & kResponseError) != 0 && !CheckString(entry.error, "an error text", error)) return false;
    if (!CheckParameters(entry.parameters_offset, entry.parameters_count, error)) return false;
  }
  return ReadTensors(block, header, "output", entries_.size(), &rows, payloads, inputs, error);
}

std::string_view ResponseRecord::ErrorText(const ResponseEntry& entry) const {
  return {Text(entry.error), entry.error.length};
}

void ResponseRecord::Parameters(const ResponseEntry& entry, std::vector<RecordParameter>* out) const {
  ReadParameters(entry.parameters_offset, entry.parameters_count, out);
}

bool CallRecord::Parse(const uint8_t* block, uint64_t length, uint64_t call, std::string* error) {
  RecordHeader header;
  if (!ReadHeader(block, length, kBatchMagic, call, &header, error) ||
      !CheckTable<RequestEntry>(header.entries_offset, header.entry_count, "requests", error)) {
    return false;
  }
  if (header.entry_count != 1) {
    *error = "a call has 1 request, " + std::to_string(header.entry_count) + " came";
    return false;
  }
  std::memcpy(&entry_, metadata_.data() + header.entries_offset, sizeof(entry_));
  if (!CheckString(entry_.id, "the request's id", error) ||
      !CheckString(entry_.correlation_string, "the correlation id", error) ||
      !CheckParameters(entry_.parameters_offset, entry_.parameters_count, error) ||
      !CheckTable<StringRef>(entry_.outputs_offset, entry_.outputs_count, "outputs", error)) {
    return false;
  }
  for (uint32_t i = 0; i < entry_.outputs_count; ++i) {
    StringRef name;
    std::memcpy(&name, metadata_.data() + entry_.outputs_offset + i * sizeof(name), sizeof(name));
    if (!CheckString(name, "an output's name", error)) return false;
  }
  return ReadTensors(block, header, "input", 1, nullptr, nullptr, nullptr, error);
}

std::vector<RecordParameter> CallRecord::Parameters() const {
  std::vector<RecordParameter> parameters;
  ReadParameters(entry_.parameters_offset, entry_.parameters_count, &parameters);
  return parameters;
}

std::vector<const char*> CallRecord::Outputs() const {
  std::vector<const char*> outputs;
  for (uint32_t i = 0; i < entry_.outputs_count; ++i) {
    StringRef name;
    std::memcpy(&name, metadata_.data() + entry_.outputs_offset + i * sizeof(name), sizeof(name));
    outputs.push_back(Text(name));
  }
  return outputs;
}

std::string WrongStrings(const uint8_t* payload, uint64_t length, uint64_t count) {
  uint64_t at = 0;
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t size;
    const auto what = [i, count] { return "string " + std::to_string(i) + " of " + std::to_string(count) + ": expected "; };
    if (length - at < sizeof(size)) return what() + "4 bytes for its length, got " + std::to_string(length - at);
    std::memcpy(&size, payload + at, sizeof(size));
    at += sizeof(size);
    if (length - at < size) {
      return what() + std::to_string(size) + " bytes, as its length says, got " + std::to_string(length - at);
    }
    at += size;
  }
  if (at == length) return "";
  return "expected nothing behind its " + std::to_string(count) + " strings, got " + std::to_string(length - at) +
         " bytes";
}

bool SplitStrings(
    const uint8_t* payload, uint64_t length, const std::vector<uint64_t>& counts, std::vector<uint64_t>* ends) {
  ends->clear();
  uint64_t at = 0;
  for (uint64_t count : counts) {
    for (uint64_t i = 0; i < count; ++i) {
      uint32_t size;
      if (length - at < sizeof(size)) return false;
      std::memcpy(&size, payload + at, sizeof(size));
      at += sizeof(size);
      if (length - at < size) return false;
      at += size;
    }
    ends->push_back(at);
  }
  return at == length;
}

bool FitsShape(
    uint32_t dtype, const int64_t* dims, uint64_t dims_count, const uint8_t* data, uint64_t length,
    std::string* error) {
  const bool strings = dtype == kBytesType;
  const uint64_t element = strings ? sizeof(uint32_t) : FixedElementSize(dtype);
  uint64_t elements = 1;
  bool counts = element != 0;
  std::string shape;
  for (uint64_t d = 0; d < dims_count; ++d) {
    counts = counts && dims[d] >= 0 && !__builtin_mul_overflow(elements, static_cast<uint64_t>(dims[d]), &elements);
  }
  uint64_t bytes = 0;
  counts = counts && !__builtin_mul_overflow(elements, element, &bytes);
  std::vector<uint64_t> ends;
  if (counts && !strings && bytes == length) return true;
  if (counts && strings && (data == nullptr ? bytes <= length : SplitStrings(data, length, {elements}, &ends))) return true;
  for (uint64_t d = 0; d < dims_count; ++d) shape += (d == 0 ? "" : ", ") + std::to_string(dims[d]);
  const std::string expected = strings ? std::to_string(elements) + " strings" : std::to_string(bytes) + " bytes";
  *error = "of " + (dtype < std::size(kTypeNames) ? kTypeNames[dtype] : "type " + std::to_string(dtype)) + " and shape [" + shape +
           "]: expected " + (counts ? expected : "a type and a shape that there are") + ", received " +
           std::to_string(length) + " bytes" + (counts && strings ? " that do not hold them" : "");
  return false;
}

}  // namespace pytriton
