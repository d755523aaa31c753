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
  return a.dtype == b.dtype && a.name == b.name && a.dims_count == b.dims_count && a.dims_count != 0 &&
         std::memcmp(a.dims + 1, b.dims + 1, (a.dims_count - 1) * sizeof(int64_t)) == 0;
}

bool AddPieces(const InputView& view, BatchSource* source, std::string* error) {
  uint64_t total = 0;
  for (uint32_t i = 0; i < view.buffer_count; ++i) {
    Piece& piece = source->pieces.emplace_back();
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t device = 0;
    if (Failed(TRITONBACKEND_InputBuffer(view.input, i, &piece.data, &piece.size, &memory, &device), error)) return false;
    if (memory == TRITONSERVER_MEMORY_GPU) {
      *error = "input '" + std::string(view.name) + "' lies in the memory of GPU " + std::to_string(device) +
               "; this backend takes inputs from host memory: send the tensor in the request or in system shared memory";
      return false;
    }
    total += piece.size;
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
  TensorSource& tensor = source->tensors.emplace_back();
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
  if (!decoupled_) last_responses_.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    Item item{requests[i], nullptr, 1, true, false, false, false, false};
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
  const auto failed = [error](TRITONSERVER_Error* result) { return Failed(result, error); };
  const char* text = nullptr;
  if (failed(TRITONBACKEND_RequestId(request, &text))) return false;
  if (text != nullptr) out.id = text;
  // A correlation id is a number, where zero means none, or a string; the call for the other kind returns an error, which
  // is no failure.
  text = nullptr;
  if (!Succeeded(TRITONBACKEND_RequestCorrelationId(request, &out.correlation_id)) &&
      Succeeded(TRITONBACKEND_RequestCorrelationIdString(request, &text)) && text != nullptr) {
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
      Succeeded(TRITONBACKEND_RequestTrace(request, &trace)) && trace != nullptr) {
    text = nullptr;
    if (Succeeded(TRITONSERVER_InferenceTraceContext(trace, &text)) && text != nullptr) {
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
    if (!AddParameter(key, type, value, source)) {
      *error = "parameter '" + std::string(key) + "' has a type that this backend does not know";
      return false;
    }
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
  // Kept from batch to batch, for their memory.
  thread_local std::vector<InputView> views;
  thread_local std::vector<size_t> begin;  // of each request in `views`
  thread_local std::vector<const InputView*> column;
  thread_local std::vector<uint8_t> joined;  // by view
  views.clear();
  begin.clear();
  for (uint32_t r = 0; r < size(); ++r) {
    begin.push_back(views.size());
    uint32_t count = 0;
    if (Failed(TRITONBACKEND_RequestInputCount(items_[r].request, &count), error)) return false;
    for (uint32_t i = 0; i < count; ++i) {
      InputView& view = views.emplace_back();
      const char* name = nullptr;
      TRITONSERVER_DataType dtype;
      if (Failed(TRITONBACKEND_RequestInputByIndex(items_[r].request, i, &view.input), error) ||
          Failed(
              TRITONBACKEND_InputProperties(
                  view.input, &name, &dtype, &view.dims, &view.dims_count, &view.byte_size, &view.buffer_count),
              error)) {
        return false;
      }
      view.name = name;
      view.dtype = static_cast<uint32_t>(dtype);
    }
    if (batching_ && count != 0 && views[begin[r]].dims_count != 0) {
      items_[r].rows = static_cast<uint32_t>(views[begin[r]].dims[0]);
    }
    source->requests[r].rows = items_[r].rows;
  }
  begin.push_back(views.size());

  const bool may_join = batching_ || size() == 1;
  const size_t inputs = begin[1];
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
  joined.assign(views.size(), 0);
  for (size_t place = 0; may_join && place < inputs; ++place) {
    column.clear();
    for (uint32_t r = 0; r < size(); ++r) {
      const InputView* view = r == 0 ? &views[place] : find(r, place);
      if (view == nullptr || (batching_ && (view->dims_count == 0 || view->dims[0] != items_[r].rows))) break;
      column.push_back(view);
    }
    if (column.size() != size()) continue;
    if (!AddTensor(column, kWholeBatch, batching_, source, error)) return false;
    for (const InputView* view : column) joined[view - views.data()] = 1;
  }
  // What is not the same in all requests (optional or ragged inputs) goes into the record request by request.
  for (uint32_t r = 0; r < size(); ++r) {
    for (size_t i = begin[r]; i < begin[r + 1]; ++i) {
      if (joined[i] != 0) continue;
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
  waits = false;
  for (auto& item : items_) item.cancelled = false;  // the next worker has not been told yet
}

TRITONBACKEND_Response* Batch::NewResponse(Item& item, std::string* error) {
  TRITONBACKEND_Response* response = nullptr;
  TRITONSERVER_Error* failed = decoupled_ ? TRITONBACKEND_ResponseNewFromFactory(&response, item.factory)
                                          : TRITONBACKEND_ResponseNew(&response, item.request);
  return Failed(failed, error) ? nullptr : response;
}

bool Batch::IsGone(const Item& item) const {
  if (late_ends_ == nullptr || item.factory == nullptr) return false;
  bool is_cancelled = false;
  return Succeeded(TRITONBACKEND_ResponseFactoryIsCancelled(item.factory, &is_cancelled)) && is_cancelled &&
         !InnerRequests::Has(item.request);
}

void Batch::SendError(Item& item, TRITONSERVER_Error_Code code, const std::string& text, bool last) {
  if (IsGone(item)) return;  // Finish sees to its end
  std::string reason;
  TRITONBACKEND_Response* response = NewResponse(item, &reason);
  if (response == nullptr) {
    PYTRITON_LOG(ERROR, "no response for an error could be made: " + reason + "; the error: " + text);
    return;
  }
  item.ended = last;
  Send(response, last, MakeError(code, text));
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

// Whether nothing more comes for the request of a decoupled model.
bool IsLast(const ResponseEntry& entry) {
  const bool failed = (entry.flags & kResponseError) != 0;
  return (entry.flags & (kResponseFinal | kResponseReschedule)) != 0 ||
         (failed && (entry.flags & kResponseContinues) == 0);
}

constexpr uint32_t kNone = UINT32_MAX;

// The rows of one response in a tensor of a record.
struct Slice {
  const RecordTensor* tensor;
  int64_t rows;  // -1: the tensor belongs to the response alone
  const uint8_t* data;
  uint64_t length;
  uint32_t next;  // of the same response
};

// The slices of all responses of a record. Kept from record to record, for its memory.
struct Slices {
  struct Chain {
    uint32_t first = kNone;
    uint32_t last = kNone;
    // Does not hold the strings that its shape announces.
    const RecordTensor* broken = nullptr;
  };
  std::vector<Slice> all;
  std::vector<Chain> chains;  // by response
  std::vector<uint64_t> counts, ends;

  void Add(size_t response, const Slice& slice) {
    const auto place = static_cast<uint32_t>(all.size());
    Chain& chain = chains[response];
    (chain.last == kNone ? chain.first : all[chain.last].next) = place;
    chain.last = place;
    all.push_back(slice);
  }
};

bool HasOutputs(const ResponseEntry& entry) { return (entry.flags & kResponseNothing) == 0; }

// Elements of a tensor along its dimensions from `first` on.
uint64_t CountElements(const RecordTensor& tensor, uint32_t first) {
  uint64_t count = 1;
  for (uint32_t d = first; d < tensor.dims_count; ++d) count *= static_cast<uint64_t>(tensor.dims[d]);
  return count;
}

void Cut(const ResponseRecord& record, Slices* slices) {
  const auto& entries = record.entries();
  slices->all.clear();
  slices->chains.assign(entries.size(), Slices::Chain{});
  for (const auto& tensor : record.tensors()) {
    const bool strings = tensor.dtype == TRITONSERVER_TYPE_BYTES;
    const bool whole = tensor.owner == kWholeBatch;
    const uint64_t per_row = CountElements(tensor, whole ? 1 : 0);
    bool split = true;
    if (strings) {
      slices->counts.clear();
      if (!whole) slices->counts.push_back(per_row);
      for (size_t i = 0; whole && i < entries.size(); ++i) {
        slices->counts.push_back(HasOutputs(entries[i]) ? entries[i].rows * per_row : 0);
      }
      split = SplitStrings(tensor.payload, tensor.payload_length, slices->counts, &slices->ends);
    }
    if (!whole) {
      if (!split) slices->chains[tensor.owner].broken = &tensor;
      slices->Add(tensor.owner, {&tensor, -1, tensor.payload, tensor.payload_length, kNone});
      continue;
    }
    const uint64_t row_bytes = per_row * FixedElementSize(tensor.dtype);
    uint64_t begin = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!HasOutputs(entries[i])) continue;
      if (!split) {
        slices->chains[i].broken = &tensor;
        continue;
      }
      const uint64_t end = strings ? slices->ends[i] : begin + entries[i].rows * row_bytes;
      slices->Add(i, {&tensor, entries[i].rows, tensor.payload + begin, end - begin, kNone});
      begin = end;
    }
  }
}

bool WriteOutput(TRITONBACKEND_Response* response, const Slice& slice, std::vector<int64_t>* dims, std::string* error) {
  const RecordTensor& tensor = *slice.tensor;
  dims->assign(tensor.dims, tensor.dims + tensor.dims_count);
  if (slice.rows >= 0) (*dims)[0] = slice.rows;
  TRITONBACKEND_Output* output = nullptr;
  if (Failed(
          TRITONBACKEND_ResponseOutput(
              response, &output, tensor.name, static_cast<TRITONSERVER_DataType>(tensor.dtype), dims->data(),
              tensor.dims_count),
          error)) {
    return false;
  }
  void* buffer = nullptr;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t device = 0;
  if (Failed(TRITONBACKEND_OutputBuffer(output, &buffer, slice.length, &memory, &device), error)) return false;
  if (memory == TRITONSERVER_MEMORY_GPU) {
    *error = std::string("output '") + tensor.name + "' is wanted in the memory of GPU " + std::to_string(device) +
             "; this backend writes outputs to host memory only";
    return false;
  }
  if (slice.length != 0) std::memcpy(buffer, slice.data, slice.length);
  return true;
}

}  // namespace

void Batch::Respond(const ResponseRecord& record) {
  const uint64_t compute_end_ns = active_ns_ = NowNs();
  touched_ = true;
  const auto& entries = record.entries();
  thread_local Slices slices;
  thread_local std::vector<int64_t> dims;
  thread_local std::vector<RecordParameter> parameters;
  Cut(record, &slices);
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
    const bool final = !decoupled_ || IsLast(entry);
    const Slices::Chain& chain = slices.chains[i];
    std::string error;
    if ((entry.flags & kResponseReschedule) != 0) {
      item.rescheduled = true;
      item.success = true;
    } else if (IsGone(item)) {
      item.success = final && (entry.flags & kResponseError) == 0;
    } else if ((entry.flags & kResponseError) != 0) {
      SendError(item, static_cast<TRITONSERVER_Error_Code>(entry.error_code <= 7 ? entry.error_code : 1),
                std::string(record.ErrorText(entry)), final);
    } else if (chain.broken != nullptr) {
      SendError(item, TRITONSERVER_ERROR_INTERNAL,
                std::string("output '") + chain.broken->name +
                    "' of the worker does not hold the strings that its shape announces");
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
        for (uint32_t at = chain.first; at != kNone; at = slices.all[at].next) {
          if (!WriteOutput(response, slices.all[at], &dims, &error)) break;
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

void Batch::Release(Item& item) {
  if (item.rescheduled) {
    const std::string error =
        TakeMessage(TRITONBACKEND_RequestRelease(item.request, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE));
    if (error.empty()) {
      item.request = nullptr;
    } else {
      // As by a model without an iterative scheduler, or while it is unloaded: the request is still ours.
      SendError(item, TRITONSERVER_ERROR_INTERNAL, error);
    }
  }
  if (item.factory != nullptr) {
    if (item.request != nullptr && !item.ended && late_ends_ != nullptr) {
      late_ends_->Add(item.factory);
    } else {
      PYTRITON_LOG_IF_ERROR(TRITONBACKEND_ResponseFactoryDelete(item.factory), "response factory");
    }
    item.factory = nullptr;
  }
  if (item.request == nullptr) return;
  PYTRITON_LOG_IF_ERROR(
      TRITONBACKEND_RequestRelease(item.request, TRITONSERVER_REQUEST_RELEASE_ALL), "releasing a request");
  item.request = nullptr;
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
    Release(item);
    --open_;
  }
  if (open_ == 0 && !reported_ && (any_success || counts_failures)) {
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
         Succeeded(
             decoupled_ ? TRITONBACKEND_ResponseFactoryIsCancelled(item.factory, &is_cancelled)
                        : TRITONBACKEND_RequestIsCancelled(item.request, &is_cancelled)) &&
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
