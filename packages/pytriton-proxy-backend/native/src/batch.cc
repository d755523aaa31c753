#include "batch.h"

#include <cstring>
#include <utility>

#include "triton_util.h"

namespace pytriton {

namespace {

// One input of one request, as Triton describes it.
struct InputView {
  std::string_view name;
  uint32_t dtype;
  const int64_t* dims;
  uint32_t dims_count;
  uint64_t byte_size;
  TRITONBACKEND_Input* input;
  uint32_t buffer_count;
};

bool SameColumn(const InputView& a, const InputView& b) {
  return a.name == b.name && a.dtype == b.dtype && a.dims_count == b.dims_count && a.dims_count != 0 &&
         std::memcmp(a.dims + 1, b.dims + 1, (a.dims_count - 1) * sizeof(int64_t)) == 0;
}

bool AddPieces(const InputView& view, BatchSource* source, std::string* error) {
  uint64_t total = 0;
  for (uint32_t i = 0; i < view.buffer_count; ++i) {
    Piece piece{};
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t device = 0;
    *error = TakeMessage(TRITONBACKEND_InputBuffer(view.input, i, &piece.data, &piece.size, &memory, &device));
    if (!error->empty()) return false;
    if (memory == TRITONSERVER_MEMORY_GPU) {
      *error = "input '" + std::string(view.name) + "' lies in the memory of GPU " + std::to_string(device) +
               "; this backend takes inputs from host memory: send the tensor in the request or in system shared memory";
      return false;
    }
    total += piece.size;
    source->pieces.push_back(piece);
  }
  if (total != view.byte_size) {
    *error = "input '" + std::string(view.name) + "' announces " + std::to_string(view.byte_size) +
             " bytes, its buffers hold " + std::to_string(total);
    return false;
  }
  return true;
}

// Adds one tensor made of the inputs `views`, whose rows lie behind each other.
bool AddTensor(
    const std::vector<const InputView*>& views, uint32_t owner, bool add_rows, BatchSource* source,
    std::string* error) {
  const InputView& first = *views[0];
  TensorSource tensor{};
  tensor.name = first.name;
  tensor.dtype = first.dtype;
  tensor.owner = owner;
  tensor.first_dim = static_cast<uint32_t>(source->dims.size());
  tensor.dims_count = first.dims_count;
  tensor.first_piece = static_cast<uint32_t>(source->pieces.size());
  source->dims.insert(source->dims.end(), first.dims, first.dims + first.dims_count);
  for (size_t i = 0; i < views.size(); ++i) {
    if (!AddPieces(*views[i], source, error)) return false;
    tensor.length += views[i]->byte_size;
    if (add_rows && i != 0) source->dims[tensor.first_dim] += views[i]->dims[0];
  }
  tensor.piece_count = static_cast<uint32_t>(source->pieces.size()) - tensor.first_piece;
  source->tensors.push_back(tensor);
  return true;
}

bool SameOutputs(const BatchSource& source, const RequestSource& a, uint32_t first, uint32_t count) {
  if (a.output_count != count) return false;
  for (uint32_t i = 0; i < count; ++i) {
    if (source.outputs[a.first_output + i] != source.outputs[first + i]) return false;
  }
  return true;
}

}  // namespace

void SendLast(LastResponses* responses) {
  for (const auto& [response, error] : *responses) {
    PYTRITON_LOG_IF_ERROR(
        TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error), "sending a response");
    if (error != nullptr) TRITONSERVER_ErrorDelete(error);
  }
  responses->clear();
}

Batch::Batch(
    uint64_t id, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count,
    bool batching, bool decoupled, std::atomic<uint64_t>* in_flight, LateEnds* late_ends)
    : id_(id),
      instance_(instance),
      batching_(batching),
      decoupled_(decoupled),
      late_ends_(late_ends),
      in_flight_(in_flight),
      open_(count),
      started_ns_(NowNs()) {
  in_flight_->fetch_add(1, std::memory_order_acq_rel);
  items_.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    Item item{requests[i], nullptr, 1, true, false, false, false};
    if (decoupled_) PYTRITON_LOG_IF_ERROR(TRITONBACKEND_ResponseFactoryNew(&item.factory, item.request), "response factory");
    items_.push_back(item);
  }
}

Batch::~Batch() {
  if (!finished()) Fail(TRITONSERVER_ERROR_INTERNAL, "the proxy backend gave the request up without an answer");
  in_flight_->fetch_sub(1, std::memory_order_acq_rel);
}

bool Batch::CollectRequest(uint32_t index, BatchSource* source, std::string* error) {
  TRITONBACKEND_Request* request = items_[index].request;
  RequestSource out;
  const auto failed = [error](TRITONSERVER_Error* result) {
    *error = TakeMessage(result);
    return !error->empty();
  };
  const char* text = nullptr;
  if (failed(TRITONBACKEND_RequestId(request, &text))) return false;
  if (text != nullptr) out.id = text;
  // A correlation id is a number or a string; the call for the other kind returns an error, which is no failure.
  text = nullptr;
  if (TakeMessage(TRITONBACKEND_RequestCorrelationId(request, &out.correlation_id)).empty()) {
    // A number; zero means none.
  } else if (TakeMessage(TRITONBACKEND_RequestCorrelationIdString(request, &text)).empty() && text != nullptr) {
    out.correlation_string = text;
  }
  uint32_t flags = 0;
  if (failed(TRITONBACKEND_RequestFlags(request, &flags))) return false;
  out.flags = flags & (kRequestSequenceStart | kRequestSequenceEnd);
  if (failed(TRITONBACKEND_InferenceRequestTimeoutMicroseconds(request, &out.timeout_us))) return false;
  if (TRITONSERVER_InferenceRequestPriorityUInt64 != nullptr &&
      failed(TRITONSERVER_InferenceRequestPriorityUInt64(
          reinterpret_cast<TRITONSERVER_InferenceRequest*>(request), &out.priority))) {
    return false;
  }
  TRITONSERVER_InferenceTrace* trace = nullptr;
  if (TRITONSERVER_InferenceTraceContext != nullptr &&
      TakeMessage(TRITONBACKEND_RequestTrace(request, &trace)).empty() && trace != nullptr) {
    text = nullptr;
    if (TakeMessage(TRITONSERVER_InferenceTraceContext(trace, &text)).empty() && text != nullptr) {
      out.trace_context = text;
    }
  }

  uint32_t count = 0;
  if (failed(TRITONBACKEND_RequestParameterCount(request, &count))) return false;
  out.first_parameter = static_cast<uint32_t>(source->parameters.size());
  for (uint32_t i = 0; i < count; ++i) {
    const char* key = nullptr;
    TRITONSERVER_ParameterType type;
    const void* value = nullptr;
    if (failed(TRITONBACKEND_RequestParameter(request, i, &key, &type, &value))) return false;
    ParameterSource parameter{key, static_cast<uint32_t>(type), {}, 0};
    switch (type) {
      case TRITONSERVER_PARAMETER_STRING:
        parameter.text = static_cast<const char*>(value);
        break;
      case TRITONSERVER_PARAMETER_BOOL:
        parameter.value = *static_cast<const bool*>(value) ? 1 : 0;
        break;
      case TRITONSERVER_PARAMETER_INT:
      case TRITONSERVER_PARAMETER_DOUBLE:
        std::memcpy(&parameter.value, value, sizeof(parameter.value));
        break;
      default:
        *error = "parameter '" + std::string(key) + "' has a type that this backend does not know";
        return false;
    }
    source->parameters.push_back(parameter);
    ++out.parameter_count;
  }

  count = 0;
  if (failed(TRITONBACKEND_RequestOutputCount(request, &count))) return false;
  out.first_output = static_cast<uint32_t>(source->outputs.size());
  out.output_count = count;
  for (uint32_t i = 0; i < count; ++i) {
    if (failed(TRITONBACKEND_RequestOutputName(request, i, &text))) return false;
    source->outputs.emplace_back(text);
  }
  // Nearly always every request wants the same outputs: they are then written once.
  if (index != 0 && SameOutputs(*source, source->requests[0], out.first_output, count)) {
    source->outputs.resize(out.first_output);
    out.first_output = source->requests[0].first_output;
  }
  source->requests.push_back(out);
  return true;
}

bool Batch::CollectTensors(BatchSource* source, std::string* error) {
  std::vector<InputView> views;
  std::vector<size_t> begin;  // of each request in `views`
  for (uint32_t r = 0; r < size(); ++r) {
    begin.push_back(views.size());
    uint32_t count = 0;
    *error = TakeMessage(TRITONBACKEND_RequestInputCount(items_[r].request, &count));
    if (!error->empty()) return false;
    for (uint32_t i = 0; i < count; ++i) {
      InputView view{};
      const char* name = nullptr;
      TRITONSERVER_DataType dtype;
      *error = TakeMessage(TRITONBACKEND_RequestInputByIndex(items_[r].request, i, &view.input));
      if (!error->empty()) return false;
      *error = TakeMessage(TRITONBACKEND_InputProperties(
          view.input, &name, &dtype, &view.dims, &view.dims_count, &view.byte_size, &view.buffer_count));
      if (!error->empty()) return false;
      view.name = name;
      view.dtype = static_cast<uint32_t>(dtype);
      views.push_back(view);
    }
    if (batching_ && count != 0 && views[begin[r]].dims_count != 0) {
      items_[r].rows = static_cast<uint32_t>(views[begin[r]].dims[0]);
    }
    source->requests[r].rows = items_[r].rows;
  }
  begin.push_back(views.size());

  const bool may_join = batching_ || size() == 1;
  const size_t inputs = begin[1];
  std::vector<const InputView*> column;
  // Requests list their inputs in any order: each column is looked up by name, at its own place first.
  const auto find = [&](uint32_t r, size_t place) -> const InputView* {
    const InputView& wanted = views[place];
    if (begin[r + 1] - begin[r] != inputs) return nullptr;
    if (SameColumn(views[begin[r] + place], wanted)) return &views[begin[r] + place];
    for (size_t i = begin[r]; i < begin[r + 1]; ++i) {
      if (SameColumn(views[i], wanted)) return &views[i];
    }
    return nullptr;
  };
  std::vector<bool> joined(views.size(), false);
  for (size_t place = 0; may_join && place < inputs; ++place) {
    column.clear();
    for (uint32_t r = 0; r < size(); ++r) {
      const InputView* view = r == 0 ? &views[place] : find(r, place);
      if (view == nullptr || (batching_ && (view->dims_count == 0 || view->dims[0] != items_[r].rows))) break;
      column.push_back(view);
    }
    if (column.size() != size()) continue;
    if (!AddTensor(column, kWholeBatch, batching_, source, error)) return false;
    for (const InputView* view : column) joined[view - views.data()] = true;
  }
  // What is not the same in all requests (optional or ragged inputs) goes into the record request by request.
  for (uint32_t r = 0; r < size(); ++r) {
    for (size_t i = begin[r]; i < begin[r + 1]; ++i) {
      if (joined[i]) continue;
      column.assign(1, &views[i]);
      if (!AddTensor(column, r, false, source, error)) return false;
    }
  }
  return true;
}

bool Batch::Collect(BatchSource* source, std::string* error) {
  source->Clear();
  for (uint32_t i = 0; i < size(); ++i) {
    if (!CollectRequest(i, source, error)) return false;
  }
  return CollectTensors(source, error);
}

uint64_t Batch::MarkSent() { return active_ns_ = sent_ns_ = NowNs(); }

void Batch::StartAgain(uint64_t id) {
  id_ = id;
  input = Block{};
  input_in_use = false;
  for (auto& item : items_) item.cancelled = false;  // the next worker has not been told yet
}

TRITONBACKEND_Response* Batch::NewResponse(Item& item, std::string* error) {
  TRITONBACKEND_Response* response = nullptr;
  *error = TakeMessage(
      decoupled_ ? TRITONBACKEND_ResponseNewFromFactory(&response, item.factory)
                 : TRITONBACKEND_ResponseNew(&response, item.request));
  return error->empty() ? response : nullptr;
}

bool Batch::IsGone(const Item& item) const {
  if (late_ends_ == nullptr || item.factory == nullptr) return false;
  bool is_cancelled = false;
  return TakeMessage(TRITONBACKEND_ResponseFactoryIsCancelled(item.factory, &is_cancelled)).empty() && is_cancelled;
}

void Batch::SendError(Item& item, TRITONSERVER_Error_Code code, const std::string& text) {
  if (IsGone(item)) return;  // Finish sees to its end
  std::string reason;
  TRITONBACKEND_Response* response = NewResponse(item, &reason);
  if (response == nullptr) {
    PYTRITON_LOG(ERROR, "no response for an error could be made: " + reason + "; the error: " + text);
    return;
  }
  item.ended = true;
  Send(response, true, MakeError(code, text));
}

void Batch::Send(TRITONBACKEND_Response* response, bool last, TRITONSERVER_Error* error) {
  if (last) {
    last_responses_.emplace_back(response, error);
    return;
  }
  PYTRITON_LOG_IF_ERROR(TRITONBACKEND_ResponseSend(response, 0, error), "sending a response");
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

namespace {

// The rows of one response in the tensors of a record.
struct Slice {
  const ResponseTensor* tensor;
  int64_t rows;  // -1: the tensor belongs to the response alone
  const uint8_t* data;
  uint64_t length;
};

bool WriteOutput(TRITONBACKEND_Response* response, const Slice& slice, std::vector<int64_t>* dims, std::string* error) {
  const ResponseTensor& tensor = *slice.tensor;
  dims->assign(tensor.dims, tensor.dims + tensor.dims_count);
  if (slice.rows >= 0) (*dims)[0] = slice.rows;
  TRITONBACKEND_Output* output = nullptr;
  *error = TakeMessage(TRITONBACKEND_ResponseOutput(
      response, &output, tensor.name, static_cast<TRITONSERVER_DataType>(tensor.dtype), dims->data(),
      tensor.dims_count));
  if (!error->empty()) return false;
  void* buffer = nullptr;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t device = 0;
  *error = TakeMessage(TRITONBACKEND_OutputBuffer(output, &buffer, slice.length, &memory, &device));
  if (!error->empty()) return false;
  if (memory == TRITONSERVER_MEMORY_GPU) {
    *error = std::string("output '") + tensor.name + "' is wanted in the memory of GPU " + std::to_string(device) +
             "; this backend writes outputs to host memory only";
    return false;
  }
  if (slice.length != 0) std::memcpy(buffer, slice.data, slice.length);
  return true;
}

// Where each response's rows of a whole-batch tensor begin and end in its payload.
bool SplitRows(
    const ResponseTensor& tensor, const std::vector<ResponseEntry>& entries, std::vector<uint64_t>* ends) {
  uint64_t per_row = 1;
  for (uint32_t d = 1; d < tensor.dims_count; ++d) per_row *= static_cast<uint64_t>(tensor.dims[d]);
  std::vector<uint64_t> counts;
  for (const auto& entry : entries) {
    const bool takes = (entry.flags & (kResponseError | kResponseEmpty)) == 0;
    counts.push_back(takes ? entry.rows * per_row : 0);
  }
  if (tensor.dtype == TRITONSERVER_TYPE_BYTES) {
    return SplitStrings(tensor.payload, tensor.payload_length, counts, ends);
  }
  ends->clear();
  uint64_t at = 0;
  for (uint64_t count : counts) ends->push_back(at += count * FixedElementSize(tensor.dtype));
  return true;
}

}  // namespace

void Batch::Respond(const ResponseRecord& record) {
  const uint64_t compute_end_ns = active_ns_ = NowNs();
  touched_ = true;
  const auto& entries = record.entries();
  std::vector<std::vector<Slice>> slices(entries.size());
  std::vector<std::string> broken(entries.size());
  std::vector<uint64_t> ends;
  for (const auto& tensor : record.tensors()) {
    const auto not_strings = [&] {
      return std::string("output '") + tensor.name +
             "' of the worker does not hold the strings that its shape announces";
    };
    if (tensor.owner != kWholeBatch) {
      if (tensor.dtype == TRITONSERVER_TYPE_BYTES) {
        uint64_t count = 1;
        for (uint32_t d = 0; d < tensor.dims_count; ++d) count *= static_cast<uint64_t>(tensor.dims[d]);
        if (!SplitStrings(tensor.payload, tensor.payload_length, {count}, &ends)) broken[tensor.owner] = not_strings();
      }
      slices[tensor.owner].push_back({&tensor, -1, tensor.payload, tensor.payload_length});
      continue;
    }
    const bool split = SplitRows(tensor, entries, &ends);
    uint64_t begin = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      if ((entries[i].flags & (kResponseError | kResponseEmpty)) != 0) continue;
      if (!split) {
        broken[i] = not_strings();
        continue;
      }
      slices[i].push_back({&tensor, entries[i].rows, tensor.payload + begin, ends[i] - begin});
      begin = ends[i];
    }
  }

  std::vector<int64_t> dims;
  std::vector<ResponseParameter> parameters;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = entries[i];
    Item& item = items_[entry.request];
    if (!item.open) {
      // Of an expired batch nobody waits for one: that it was late is in the log already.
      if (expired) continue;
      PYTRITON_LOG(WARN, "a worker answered request " + std::to_string(entry.request) + " of batch " +
                             std::to_string(id_) + " after its last response; the answer is dropped");
      continue;
    }
    const bool final = !decoupled_ || (entry.flags & (kResponseFinal | kResponseError)) != 0;
    std::string error = broken[i];
    if (IsGone(item)) {
      item.success = final && (entry.flags & kResponseError) == 0;
    } else if ((entry.flags & kResponseError) != 0) {
      SendError(item, static_cast<TRITONSERVER_Error_Code>(entry.error_code <= 7 ? entry.error_code : 1),
                std::string(record.ErrorText(entry)));
    } else if (!error.empty()) {
      SendError(item, TRITONSERVER_ERROR_INTERNAL, error);
      item.open = false;
    } else if ((entry.flags & kResponseEmpty) != 0 && decoupled_) {
      if (final) {
        PYTRITON_LOG_IF_ERROR(
            TRITONBACKEND_ResponseFactorySendFlags(item.factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL),
            "ending a stream");
        item.ended = true;
        item.success = true;
      }
    } else {
      TRITONBACKEND_Response* response = NewResponse(item, &error);
      if (response == nullptr) {
        PYTRITON_LOG(ERROR, "no response could be made: " + error);
      } else {
        for (const Slice& slice : slices[i]) {
          if (!WriteOutput(response, slice, &dims, &error)) break;
        }
        record.Parameters(entry, &parameters);
        for (const auto& parameter : parameters) {
          if (!error.empty()) break;
          double number;
          std::memcpy(&number, &parameter.value, sizeof(number));
          TRITONSERVER_Error* result = nullptr;
          switch (parameter.type) {
            case TRITONSERVER_PARAMETER_STRING:
              result = TRITONBACKEND_ResponseSetStringParameter(response, parameter.key, parameter.text);
              break;
            case TRITONSERVER_PARAMETER_INT:
              result = TRITONBACKEND_ResponseSetIntParameter(
                  response, parameter.key, static_cast<int64_t>(parameter.value));
              break;
            case TRITONSERVER_PARAMETER_BOOL:
              result = TRITONBACKEND_ResponseSetBoolParameter(response, parameter.key, parameter.value != 0);
              break;
            default:
              result = TRITONBACKEND_ResponseSetDoubleParameter(response, parameter.key, number);
          }
          error = TakeMessage(result);
        }
        TRITONSERVER_Error* failure =
            error.empty() ? nullptr : MakeError(TRITONSERVER_ERROR_INTERNAL, error);
        const bool last = final || failure != nullptr;
        item.success = failure == nullptr;
        Send(response, last, failure);
        item.ended = last;
        if (last) item.open = false;
      }
    }
    if (final) item.open = false;
  }
  Finish(compute_end_ns);
}

void Batch::Fail(TRITONSERVER_Error_Code code, const std::string& text) {
  for (auto& item : items_) {
    if (!item.open) continue;
    SendError(item, code, text);
    item.open = false;
    item.success = false;
  }
  Finish(NowNs());
}

void Batch::Finish(uint64_t compute_end_ns) {
  const uint64_t end_ns = NowNs();
  const uint64_t sent_ns = sent_ns_ != 0 ? sent_ns_ : started_ns_;
  uint64_t rows = 0;
  bool any_success = false;
  for (auto& item : items_) {
    rows += item.rows;
    any_success = any_success || item.success;
    if (item.open || item.request == nullptr) continue;
    PYTRITON_LOG_IF_ERROR(
        TRITONBACKEND_ModelInstanceReportStatistics(
            instance_, item.request, item.success, started_ns_, sent_ns, compute_end_ns, end_ns),
        "request statistics");
    if (item.factory != nullptr) {
      if (!item.ended && late_ends_ != nullptr) {
        late_ends_->Add(item.factory);
      } else {
        PYTRITON_LOG_IF_ERROR(TRITONBACKEND_ResponseFactoryDelete(item.factory), "response factory");
      }
      item.factory = nullptr;
    }
    PYTRITON_LOG_IF_ERROR(
        TRITONBACKEND_RequestRelease(item.request, TRITONSERVER_REQUEST_RELEASE_ALL), "releasing a request");
    item.request = nullptr;
    --open_;
  }
  if (open_ == 0 && !reported_ && any_success) {
    reported_ = true;
    PYTRITON_LOG_IF_ERROR(
        TRITONBACKEND_ModelInstanceReportBatchStatistics(
            instance_, rows, started_ns_, sent_ns, compute_end_ns, end_ns),
        "batch statistics");
  }
  if (open_ == 0 && held_back != nullptr) {
    held_back->insert(held_back->end(), last_responses_.begin(), last_responses_.end());
    last_responses_.clear();
  } else {
    SendLast(&last_responses_);
  }
}

void Batch::PollCancelled(const std::function<void(uint32_t)>& cancelled) {
  for (uint32_t i = 0; i < size(); ++i) {
    Item& item = items_[i];
    if (!item.open || item.cancelled) continue;
    if (IsCancelled(i)) {
      item.cancelled = true;
      cancelled(i);
    }
  }
}

bool Batch::IsCancelled(uint32_t request) const {
  const Item& item = items_[request];
  bool is_cancelled = false;
  return item.open &&
         TakeMessage(
             decoupled_ ? TRITONBACKEND_ResponseFactoryIsCancelled(item.factory, &is_cancelled)
                        : TRITONBACKEND_RequestIsCancelled(item.request, &is_cancelled))
             .empty() &&
         is_cancelled;
}

void Batch::CancelOpen(const std::function<void(uint32_t)>& cancelled) {
  for (uint32_t i = 0; i < size(); ++i) {
    Item& item = items_[i];
    if (!item.open || item.cancelled) continue;
    item.cancelled = true;
    cancelled(i);
  }
}

}  // namespace pytriton
