#include "batch.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <new>
#include <numeric>
#include <utility>

#include "../triton/triton_util.h"
#include "parameters.h"

namespace pytriton {

namespace {

// No tensor has more bytes than this, and sums of a whole batch do not overflow.
constexpr uint64_t kLargestTensor = uint64_t{1} << 48;

// One input of one request, as Triton describes it.
struct InputView {
  std::string_view name;
  uint32_t dtype;
  const int64_t* dims;
  uint32_t dims_count;
  uint64_t byte_size;
  TRITONBACKEND_Input* input;
  uint32_t buffer_count;
  uint32_t first_piece;  // an index in Inputs::pieces
  uint64_t elements;
};

// The inputs of all requests of a batch. The object is used again for the next batch, to keep its memory.
struct Inputs {
  std::vector<InputView> views;
  std::vector<size_t> begin;  // where the views of each request begin in `views`, and where the last ones end
  std::vector<Piece> pieces;
  std::vector<const InputView*> column;
  std::vector<uint8_t> joined;  // one for each view
  std::vector<DevicePiece> device_pieces;
};
thread_local Inputs inputs;

bool SameColumn(const InputView& a, const InputView& b) {
  return a.dtype == b.dtype && a.name == b.name && a.dims_count == b.dims_count && a.dims_count != 0 &&
         std::memcmp(a.dims + 1, b.dims + 1, (a.dims_count - 1) * sizeof(int64_t)) == 0;
}

std::string InputName(const InputView& view) { return "input '" + std::string(view.name) + "'"; }

// Checks that an input has the dimensions of the model's, and as many bytes as its shape says. Joining requests relies
// on both, so they are checked here even if the server has checked them. The bytes of strings are checked in the
// record.
bool HasItsForm(InputView* view, const InputRanks* ranks, std::string* error) {
  const uint32_t rank = ranks == nullptr ? 0 : ranks->Find(view->name);
  if (rank != 0 && view->dims_count != rank) {
    // Triton does not recognize a batch without rows as a batch.
    *error = InputName(*view) + ": expected " + std::to_string(rank) + " dimensions, got " +
             std::to_string(view->dims_count) + "; where there is a batch axis, it has 1 row or more";
    return false;
  }
  const bool strings = view->dtype == TRITONSERVER_TYPE_BYTES;
  const uint32_t element = FixedElementSize(view->dtype);
  if (!strings && element == 0) {
    *error = InputName(*view) + " has data type " + std::to_string(view->dtype) + ", which this backend does not know";
    return false;
  }
  // An empty tensor has its other dimensions checked as well, because numpy cannot make an array with arbitrary ones.
  uint64_t bytes = strings ? sizeof(uint32_t) : element;
  bool is_empty = false;
  for (uint32_t d = 0; d < view->dims_count; ++d) {
    const int64_t dim = view->dims[d];
    is_empty = is_empty || dim == 0;
    if (dim < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(std::max<int64_t>(dim, 1)), &bytes) ||
        bytes > kLargestTensor) {
      *error = InputName(*view) + ": dimension " + std::to_string(dim) + " is negative, or too large with the others";
      return false;
    }
  }
  view->elements = is_empty ? 0 : strings ? bytes / sizeof(uint32_t) : bytes / element;
  if (is_empty) bytes = 0;
  if (strings || bytes == view->byte_size) return true;
  *error = InputName(*view) + ": expected " + std::to_string(bytes) + " bytes for its shape, got " +
           std::to_string(view->byte_size);
  return false;
}

// Notes on which device the piece of an input lies that was read last. Returns false with the reason if it cannot be
// copied from there.
bool NoteDevice(const InputView& view, int64_t device, std::string* error) {
  if (!HasCudaRuntime()) {
    *error = InputName(view) + " lies in the memory of GPU " + std::to_string(device) +
             ", and no CUDA runtime (libcudart) is loaded in this process to copy it with: send the tensor in the "
             "request or in system shared memory";
    return false;
  }
  Piece& piece = inputs.pieces.back();
  const auto place = static_cast<uint32_t>(inputs.pieces.size() - 1);
  const auto request = static_cast<uint32_t>(inputs.begin.size() - 1);
  if (piece.size != 0) inputs.device_pieces.push_back({place, request, static_cast<int32_t>(device), piece.data});
  piece.data = nullptr;
  return true;
}

bool ReadPieces(const InputView& view, std::string* error) {
  auto& pieces = inputs.pieces;
  uint64_t total = 0;
  for (uint32_t i = 0; i < view.buffer_count; ++i) {
    Piece& piece = pieces.emplace_back();
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t device = 0;
    if (Failed(TRITONBACKEND_InputBuffer(view.input, i, &piece.data, &piece.size, &memory, &device), error)) return false;
    if (memory == TRITONSERVER_MEMORY_GPU) {
      if (!NoteDevice(view, device, error)) return false;
    } else if (piece.data == nullptr && piece.size != 0) {
      *error = InputName(view) + " has " + std::to_string(piece.size) + " bytes and no address";
      return false;
    }
    total += piece.size;
  }
  if (total == view.byte_size) return true;
  *error = InputName(view) + " announces " + std::to_string(view.byte_size) + " bytes, its buffers hold " +
           std::to_string(total);
  return false;
}

bool ReadInputs(TRITONBACKEND_Request* request, const InputRanks* ranks, std::string* error) {
  uint32_t count = 0;
  if (Failed(TRITONBACKEND_RequestInputCount(request, &count), error)) return false;
  for (uint32_t i = 0; i < count; ++i) {
    InputView& view = inputs.views.emplace_back();
    const char* name = nullptr;
    TRITONSERVER_DataType dtype;
    if (Failed(TRITONBACKEND_RequestInputByIndex(request, i, &view.input), error) ||
        Failed(
            TRITONBACKEND_InputProperties(
                view.input, &name, &dtype, &view.dims, &view.dims_count, &view.byte_size, &view.buffer_count),
            error)) {
      return false;
    }
    view.name = name;
    view.dtype = static_cast<uint32_t>(dtype);
    view.first_piece = static_cast<uint32_t>(inputs.pieces.size());
    if (!HasItsForm(&view, ranks, error) || !ReadPieces(view, error)) return false;
  }
  return true;
}

// Finds the first piece on a device whose number is `piece` or higher.
std::vector<DevicePiece>::const_iterator FindDevicePiece(uint32_t piece) {
  return std::lower_bound(
      inputs.device_pieces.begin(), inputs.device_pieces.end(), piece,
      [](const DevicePiece& each, uint32_t wanted) { return each.piece < wanted; });
}

// Adds the pieces of an input that lie on devices. To be called before the pieces of the input are added.
void AddDevicePieces(const InputView& view, BatchSource* source) {
  const auto begin = static_cast<uint32_t>(source->pieces.size());
  for (auto each = FindDevicePiece(view.first_piece);
       each != inputs.device_pieces.end() && each->piece < view.first_piece + view.buffer_count; ++each) {
    source->device_pieces.push_back({begin + each->piece - view.first_piece, each->request, each->device, each->data});
  }
}

// Adds one tensor that is made of the inputs in `inputs.column`, one after the other: those of all requests, or that of
// the owner.
void AddTensor(uint32_t owner, bool add_rows, BatchSource* source) {
  const auto& views = inputs.column;
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
    const InputView& view = *views[i];
    const auto pieces = inputs.pieces.begin() + view.first_piece;
    if (!inputs.device_pieces.empty()) AddDevicePieces(view, source);
    source->pieces.insert(source->pieces.end(), pieces, pieces + view.buffer_count);
    if (first.dtype == TRITONSERVER_TYPE_BYTES) {
      source->strings.push_back(
          {static_cast<uint32_t>(source->tensors.size() - 1),
           owner == kWholeBatch ? static_cast<uint32_t>(i) : owner, tensor.length, view.byte_size, view.elements});
    }
    tensor.length += view.byte_size;
    if (add_rows && i != 0) source->dims[tensor.first_dim] += view.dims[0];
  }
  tensor.piece_count = static_cast<uint32_t>(source->pieces.size()) - tensor.first_piece;
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
    Item item{};
    item.request = requests[i];
    item.rows = 1;
    item.open = true;
    // Without a factory, the request has only one response, and the error goes into it when the batch is collected.
    if (decoupled_ && !Succeeded(TRITONBACKEND_ResponseFactoryNew(&item.factory, item.request))) item.factory = nullptr;
    items_.push_back(std::move(item));
  }
}

Batch::Batch(uint64_t id, const Batch& like)
    : ranks(like.ranks),
      cache(like.cache),
      devices(like.devices),
      returns(like.returns),
      counts_failures(like.counts_failures),
      loss(like.loss),
      id_(id),
      instance_(like.instance_),
      state_(like.state_),
      batching_(like.batching_),
      decoupled_(like.decoupled_),
      late_ends_(like.late_ends_),
      in_flight_(like.in_flight_),
      open_(0),
      started_ns_(like.started_ns_) {
  in_flight_->fetch_add(1, std::memory_order_acq_rel);
}

Batch::~Batch() {
  if (!finished()) Fail(TRITONSERVER_ERROR_INTERNAL, "the proxy backend gave the request up without an answer");
  in_flight_->fetch_sub(1, std::memory_order_acq_rel);
}

bool Batch::CollectRequest(const Item& item, BatchSource* source, std::string* error) {
  TRITONBACKEND_Request* request = item.request;
  RequestSource out;
  const auto failed = [error](TRITONSERVER_Error* result) { return Failed(result, error); };
  const char* text = nullptr;
  if (failed(TRITONBACKEND_RequestId(request, &text))) return false;
  if (text != nullptr) out.id = text;
  // A correlation id is a number, of which zero means none, or a string. The call for the other kind returns an error,
  // which is ignored.
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
  // Nearly all requests of a batch want the same outputs, which are then written only once.
  if (!source->requests.empty() && SameOutputs(*source, source->requests[0], out.first_output, count)) {
    source->outputs.resize(out.first_output);
    out.first_output = source->requests[0].first_output;
  }
  source->requests.push_back(out);
  return ReadInputs(request, ranks, error);
}

void Batch::CollectTensors(BatchSource* source) {
  const auto& views = inputs.views;
  const auto& begin = inputs.begin;
  auto& column = inputs.column;
  const bool may_join = batching_ || size() == 1;
  const size_t first_inputs = begin[1];
  // Requests may list their inputs in any order, so each one is looked up by its name, first at the place where it is
  // expected.
  const auto find = [&](uint32_t r, size_t place) -> const InputView* {
    const InputView& wanted = views[place];
    if (begin[r + 1] - begin[r] != first_inputs) return nullptr;
    if (SameColumn(views[begin[r] + place], wanted)) return &views[begin[r] + place];
    for (size_t i = begin[r]; i < begin[r + 1]; ++i) {
      if (SameColumn(views[i], wanted)) return &views[i];
    }
    return nullptr;
  };
  inputs.joined.assign(views.size(), 0);
  for (size_t place = 0; may_join && place < first_inputs; ++place) {
    column.clear();
    for (uint32_t r = 0; r < size(); ++r) {
      const InputView* view = r == 0 ? &views[place] : find(r, place);
      if (view == nullptr || (batching_ && (view->dims_count == 0 || view->dims[0] != items_[r].rows))) break;
      column.push_back(view);
    }
    if (column.size() != size()) continue;
    AddTensor(kWholeBatch, batching_, source);
    for (const InputView* view : column) inputs.joined[view - views.data()] = 1;
  }
  // Inputs that only some requests have, or whose shapes differ, are written into the record for each request by
  // itself.
  for (uint32_t r = 0; r < size(); ++r) {
    for (size_t i = begin[r]; i < begin[r + 1]; ++i) {
      if (inputs.joined[i] != 0) continue;
      column.assign(1, &views[i]);
      AddTensor(r, false, source);
    }
  }
}

// Tells whether the callable must see a request even if its caller has left: a callable that keeps the state of
// sequences must see where each of them begins and ends.
bool Batch::MarksSequence(const Item& item) {
  uint32_t flags = 0;
  return Succeeded(TRITONBACKEND_RequestFlags(item.request, &flags)) &&
         (flags & (kRequestSequenceStart | kRequestSequenceEnd)) != 0;
}

void Batch::Collect(BatchSource* source) {
  source->Clear();
  Inputs& read = inputs;
  read.views.clear();
  read.begin.assign(1, 0);
  read.pieces.clear();
  read.device_pieces.clear();
  bool all = true;
  for (Item& item : items_) {
    const size_t requests = source->requests.size();
    const size_t parameters = source->parameters.size();
    const size_t outputs = source->outputs.size();
    const size_t pieces = read.pieces.size();
    std::string error;
    TRITONSERVER_Error_Code code = TRITONSERVER_ERROR_INVALID_ARG;
    if (decoupled_ && item.factory == nullptr) {
      error = "the server has made no factory for the responses of the request";
      code = TRITONSERVER_ERROR_UNAVAILABLE;
    } else if (IsCancelled(item) && !MarksSequence(item)) {
      error = "the caller has left before the request was served";
      code = TRITONSERVER_ERROR_CANCELLED;
    }
    if (error.empty() && CollectRequest(item, source, &error)) {
      const size_t first = read.begin.back();
      if (batching_ && read.views.size() != first && read.views[first].dims_count != 0) {
        item.rows = static_cast<uint32_t>(read.views[first].dims[0]);
      }
      source->requests.back().rows = item.rows;
      if (!AnswerFromCache(&item, *source)) {
        read.begin.push_back(read.views.size());
        continue;
      }
    } else {
      RefuseOne(item, code, error);
    }
    all = false;
    source->requests.resize(requests);
    source->parameters.resize(parameters);
    source->outputs.resize(outputs);
    read.views.resize(read.begin.back());
    read.pieces.resize(pieces);
    read.device_pieces.erase(FindDevicePiece(static_cast<uint32_t>(pieces)), read.device_pieces.end());
  }
  if (!all) DropRefused();
  if (!finished()) CollectTensors(source);
}

bool Batch::CompleteRecord(const BatchSource& source, const BatchLayout& layout, uint8_t* record) {
  bool all = true;
  const auto refuse = [&](uint32_t request, TRITONSERVER_Error_Code code, const std::string& reason) {
    all = false;
    if (items_[request].open) RefuseOne(items_[request], code, reason);
  };
  if (!source.device_pieces.empty()) {
    devices->Copy(CopiesOf(source, layout, record), [&](const DeviceCopy& copy, const std::string& reason) {
      refuse(copy.request, TRITONSERVER_ERROR_INTERNAL, reason);
    });
  }
  pytriton::CheckStrings(source, layout, record, [&](uint32_t request, const std::string& reason) {
    refuse(request, TRITONSERVER_ERROR_INVALID_ARG, reason);
  });
  if (!all) DropRefused();
  return all;
}

std::unique_ptr<Batch> Batch::SplitOff(uint64_t id) {
  if (items_.size() < 2) return nullptr;
  std::unique_ptr<Batch> part(new Batch(id, *this));
  const auto middle = items_.begin() + static_cast<std::ptrdiff_t>(items_.size() / 2);
  part->items_.assign(std::make_move_iterator(items_.begin()), std::make_move_iterator(middle));
  items_.erase(items_.begin(), middle);
  part->open_ = part->size();
  open_ -= part->size();
  cost = 0;
  return part;
}

namespace {

// Returns the sizes of the free dimensions of a request in the batch that was collected last.
std::vector<uint64_t> FreeSizes(uint32_t request, const std::vector<const InputForm*>& forms) {
  std::vector<uint64_t> sizes;
  for (const InputForm* form : forms) {
    const InputView* found = nullptr;
    for (size_t i = inputs.begin[request]; i < inputs.begin[request + 1]; ++i) {
      if (inputs.views[i].name == form->name) found = &inputs.views[i];
    }
    for (const uint32_t axis : form->free) {
      // `HasItsForm` has made sure that the input has the model's number of dimensions, and that none is negative.
      sizes.push_back(found == nullptr ? CostCut::kAbsent : static_cast<uint64_t>(found->dims[axis]));
    }
  }
  return sizes;
}

// Describes an error if inputs that must have the same free dimensions in a request have not; returns "" if they have.
std::string WrongLengths(
    const std::vector<uint64_t>& sizes, const std::vector<const InputForm*>& forms, const std::vector<bool>& alike) {
  const uint64_t* first = nullptr;
  const InputForm* first_form = nullptr;
  const uint64_t* own = sizes.data();
  for (size_t i = 0; i < forms.size(); own += forms[i++]->free.size()) {
    if (!alike[i] || *own == CostCut::kAbsent) continue;
    if (first == nullptr) {
      first = own;
      first_form = forms[i];
    }
    for (size_t axis = 0; axis < std::min(forms[i]->free.size(), first_form->free.size()); ++axis) {
      if (own[axis] == first[axis]) continue;
      return "input '" + forms[i]->name + "' has the size " + std::to_string(own[axis]) + " where input '" +
             first_form->name + "' has " + std::to_string(first[axis]) +
             ": in each request, both have the same free dimensions";
    }
  }
  return "";
}

// Describes the costliest input of a request for an error: "input 'text' with 2 rows of 9000".
std::string DescribeCostliest(uint32_t rows, const std::vector<uint64_t>& sizes, const std::vector<const InputForm*>& forms) {
  std::string costliest;
  uint64_t most = 0;
  auto size = sizes.begin();
  for (const InputForm* form : forms) {
    uint64_t product = 1;
    std::string listed;
    const bool is_absent = *size == CostCut::kAbsent;
    for (size_t axis = 0; axis < form->free.size(); ++axis, ++size) {
      if (__builtin_mul_overflow(product, std::max<uint64_t>(*size, 1), &product)) product = UINT64_MAX;
      listed += (axis == 0 ? "" : " x ") + std::to_string(*size);
    }
    if (is_absent || product < most) continue;
    most = product;
    costliest = "input '" + form->name + "' with " + std::to_string(rows) + (rows == 1 ? " row of " : " rows of ") + listed;
  }
  return costliest;
}

}  // namespace

std::vector<std::unique_ptr<Batch>> Batch::CutByCost(
    const Settings& settings, uint64_t overhead, BatchSource* scratch, const std::function<uint64_t()>& next_id) {
  std::vector<std::unique_ptr<Batch>> parts;
  Collect(scratch);
  std::vector<const InputForm*> forms;
  std::vector<uint32_t> axes;
  std::vector<bool> alike;
  for (size_t place = 0; place < ranks->forms().size(); ++place) {
    const InputForm& form = ranks->forms()[place];
    if (form.free.empty()) continue;
    forms.push_back(&form);
    axes.push_back(static_cast<uint32_t>(form.free.size()));
    alike.push_back(place < 64 && (settings.cost_alike >> place & 1) != 0);
  }
  CostCut cut(settings, axes, overhead);
  bool all = true;
  for (uint32_t r = 0; r < size(); ++r) {
    Item& item = items_[r];
    auto sizes = FreeSizes(r, forms);
    std::string wrong = WrongLengths(sizes, forms, alike);
    const uint64_t cost = cut.CostOf(item.rows, sizes);
    if (wrong.empty() && cost > settings.cost_limit && !settings.cost_alone) {
      wrong = "a batch of this model may cost " + std::to_string(settings.cost_limit) + ", and this request costs " +
              std::to_string(cost) + " by itself: " + DescribeCostliest(item.rows, sizes, forms) +
              ". Send fewer rows, or shorter ones";
    }
    if (wrong.empty()) {
      cut.Add(item.rows, std::move(sizes));
      continue;
    }
    RefuseOne(item, TRITONSERVER_ERROR_INVALID_ARG, wrong);
    all = false;
  }
  if (!all) DropRefused();
  if (finished()) return parts;
  // All memory is taken before the first request leaves its batch, so that a lack of memory changes nothing.
  const auto batches = cut.Cut();
  for (size_t i = 0; i + 1 < batches.size(); ++i) {
    parts.emplace_back(new Batch(next_id(), *this))->items_.reserve(batches[i].places.size());
  }
  std::vector<Item> rest;
  rest.reserve(batches.back().places.size());
  for (size_t i = 0; i < batches.size(); ++i) {
    auto& items = i < parts.size() ? parts[i]->items_ : rest;
    for (const uint32_t place : batches[i].places) items.push_back(std::move(items_[place]));
    Batch& batch = i < parts.size() ? *parts[i] : *this;
    batch.cost = batches[i].cost;
    batch.open_ = static_cast<uint32_t>(batches[i].places.size());
  }
  items_.swap(rest);
  return parts;
}

std::unique_ptr<Question> Batch::QuestionOf(const BatchSource& source) const {
  const RequestSource& request = source.requests.back();
  // The answer to a request of a sequence depends on the requests before it, so it cannot be kept.
  if (request.flags != 0 || request.correlation_id != 0 || !request.correlation_string.empty()) return nullptr;
  const size_t first = inputs.begin.back();
  const size_t count = inputs.views.size() - first;
  // Callers may list inputs and parameters in any order, so they are sorted for the comparison.
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), first);
  std::sort(order.begin(), order.end(), [](size_t a, size_t b) { return inputs.views[a].name < inputs.views[b].name; });
  std::vector<ParameterSource> parameters(
      source.parameters.begin() + request.first_parameter,
      source.parameters.begin() + request.first_parameter + request.parameter_count);
  std::stable_sort(parameters.begin(), parameters.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  auto question = std::make_unique<Question>();
  question->AddNumber(cache->owner());
  // Callables may read both of these, so they are a part of the question.
  question->AddNumber(request.priority);
  question->AddNumber(request.timeout_us);
  question->AddNumber(parameters.size());
  for (const auto& parameter : parameters) {
    question->AddText(parameter.key);
    question->AddNumber(parameter.type);
    question->AddNumber(parameter.value);
    question->AddText(parameter.text);
  }
  question->AddNumber(request.output_count);
  for (uint32_t i = 0; i < request.output_count; ++i) question->AddText(source.outputs[request.first_output + i]);
  question->AddNumber(count);
  uint64_t bytes = 0;
  for (const size_t i : order) {
    const InputView& view = inputs.views[i];
    question->AddText(view.name);
    question->AddNumber(view.dtype);
    question->AddNumber(view.dims_count);
    for (uint32_t d = 0; d < view.dims_count; ++d) question->AddNumber(static_cast<uint64_t>(view.dims[d]));
    question->AddNumber(view.byte_size);
    bytes += view.byte_size;
  }
  if (!cache->Fits(question->bytes.size() + bytes)) return nullptr;
  question->bytes.reserve(question->bytes.size() + bytes);
  question->payloads.resize(count);
  std::vector<DeviceCopy> copies;
  for (const size_t i : order) {
    const InputView& view = inputs.views[i];
    question->payloads[i - first] = question->bytes.size();
    for (uint32_t p = 0; p < view.buffer_count; ++p) {
      const Piece& piece = inputs.pieces[view.first_piece + p];
      if (piece.size == 0) continue;
      if (piece.data != nullptr) {
        question->bytes.append(static_cast<const char*>(piece.data), piece.size);
        continue;
      }
      const DevicePiece& found = *FindDevicePiece(view.first_piece + p);
      // Memory was reserved for the whole question, so this address stays valid.
      char* const target = &question->bytes[0] + question->bytes.size();
      copies.push_back({view.name, false, target, found.data, piece.size, found.device, 0});
      question->bytes.append(piece.size, '\0');
    }
  }
  // An error is dropped here, because the record is written next and reports it.
  bool copied = true;
  if (!copies.empty()) devices->Copy(copies, [&copied](const DeviceCopy&, const std::string&) { copied = false; });
  return copied ? std::move(question) : nullptr;
}

bool Batch::AnswerFromCache(Item* item, const BatchSource& source) {
  if (cache == nullptr) return false;
  if (!item->asked) {
    item->asked = true;
    const uint64_t began_ns = NowNs();
    item->question = QuestionOf(source);
    const auto answer = item->question == nullptr ? nullptr : cache->Find(item->question.get());
    if (answer != nullptr) SendCached(item, *answer);
    if (item->question != nullptr && cache->counter() != nullptr) {
      const uint64_t spent_ns = NowNs() - began_ns;
      item->cached ? cache->counter()->Hit(spent_ns) : cache->counter()->Miss(spent_ns);
    }
    if (item->cached) return true;
  }
  if (item->question == nullptr) return false;
  // The worker gets the bytes that were compared, even if the caller changes its shared memory meanwhile.
  size_t place = inputs.begin.back();
  for (const uint64_t payload : item->question->payloads) {
    InputView& view = inputs.views[place++];
    view.first_piece = static_cast<uint32_t>(inputs.pieces.size());
    view.buffer_count = 1;
    inputs.pieces.push_back({item->question->bytes.data() + payload, view.byte_size});
  }
  return false;
}

void Batch::RefuseOne(Item& item, TRITONSERVER_Error_Code code, const std::string& reason) {
  SendError(item, code, reason);
  item.open = false;
}

void Batch::DropRefused() {
  Finish(NowNs());
  items_.erase(
      std::remove_if(items_.begin(), items_.end(), [](const Item& item) { return item.request == nullptr; }),
      items_.end());
}

uint64_t Batch::MarkSent() { return active_ns_ = sent_ns_ = NowNs(); }

void Batch::StartAgain(uint64_t id) {
  id_ = id;
  input = Block{};
  input_in_use = false;
  // the next worker has not been told of cancellations
  for (auto& item : items_) item.cancelled = item.is_told = false;
}

TRITONBACKEND_Response* Batch::NewResponse(Item& item, std::string* error) {
  TRITONBACKEND_Response* response = nullptr;
  TRITONSERVER_Error* failed = item.factory != nullptr ? TRITONBACKEND_ResponseNewFromFactory(&response, item.factory)
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
  if (IsGone(item)) return;  // `Finish` ends the request
  std::string reason;
  TRITONBACKEND_Response* response = NewResponse(item, &reason);
  if (response == nullptr) {
    PYTRITON_LOG(ERROR, "no response for an error could be made: " + reason + "; the error: " + text);
    // This response failed, but a stream can still be ended with an empty last response.
    item.ended = last && item.factory != nullptr &&
                 Succeeded(TRITONBACKEND_ResponseFactorySendFlags(item.factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL));
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

void Batch::SendToStream(Item& item, TRITONBACKEND_Response* response, uint64_t bytes) {
  AnnounceResponse(bytes, item.pace == nullptr);
  Send(response, false, nullptr);
  if (item.pace != nullptr) return;
  void* const stream = TakeStream();
  if (stream != nullptr) item.pace = std::make_unique<StreamPace>(stream);
}

namespace {

// Tells whether a response entry is the last one for its request of a decoupled model.
bool IsLast(const ResponseEntry& entry) {
  const bool failed = (entry.flags & kResponseError) != 0;
  return (entry.flags & (kResponseFinal | kResponseReschedule)) != 0 ||
         (failed && (entry.flags & kResponseContinues) == 0);
}

constexpr uint32_t kNone = UINT32_MAX;

// The rows of a tensor in a record that belong to one response.
struct Slice {
  const RecordTensor* tensor;
  int64_t rows;  // -1 if the whole tensor belongs to the response
  const uint8_t* data;
  uint64_t length;
  uint64_t elements;
  uint32_t next;  // the next slice of the same response
};

// The slices of all responses of a record. The object is used again for the next record, to keep its memory.
struct Slices {
  struct Chain {
    uint32_t first = kNone;
    uint32_t last = kNone;
    // An output whose payload is too short for the strings of all responses, or null.
    const RecordTensor* broken = nullptr;
  };
  std::vector<Slice> all;
  std::vector<Chain> chains;  // one for each response
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

// Counts the elements of a tensor over its dimensions from `first` on.
uint64_t CountElements(const RecordTensor& tensor, uint32_t first) {
  uint64_t count = 1;
  for (uint32_t d = first; d < tensor.dims_count; ++d) count *= static_cast<uint64_t>(tensor.dims[d]);
  return count;
}

void Cut(const ResponseRecord& record, Slices* slices) {
  const auto& entries = record.entries();
  slices->all.clear();
  slices->chains.assign(entries.size(), Slices::Chain{});
  const auto with_outputs = std::count_if(entries.begin(), entries.end(), HasOutputs);
  for (const auto& tensor : record.tensors()) {
    const bool strings = tensor.dtype == TRITONSERVER_TYPE_BYTES;
    const bool whole = tensor.owner == kWholeBatch;
    const uint64_t per_row = CountElements(tensor, whole ? 1 : 0);
    if (!whole) {
      slices->Add(tensor.owner, {&tensor, -1, tensor.payload, tensor.payload_length, per_row, kNone});
      continue;
    }
    // The worker decides where strings end, and can change the bytes until they are copied. So what is found here is
    // guaranteed to lie within the tensor, and nothing else.
    bool split = true;
    if (strings && with_outputs > 1) {
      slices->counts.clear();
      for (const auto& entry : entries) slices->counts.push_back(HasOutputs(entry) ? entry.rows * per_row : 0);
      split = SplitStrings(tensor.payload, tensor.payload_length, slices->counts, &slices->ends);
    }
    const uint64_t row_bytes = per_row * FixedElementSize(tensor.dtype);
    uint64_t begin = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!HasOutputs(entries[i])) continue;
      if (!split) {
        slices->chains[i].broken = &tensor;
        continue;
      }
      const uint64_t end = !strings            ? begin + entries[i].rows * row_bytes
                           : with_outputs == 1 ? tensor.payload_length
                                               : slices->ends[i];
      slices->Add(
          i, {&tensor, entries[i].rows, tensor.payload + begin, end - begin, entries[i].rows * per_row, kNone});
      begin = end;
    }
  }
}

// The outputs of one response that their caller wants in the memory of devices.
struct DeviceOutputs {
  std::vector<DeviceCopy> copies;
  std::list<std::string> strings;  // checked copies of strings, because the memory of a device cannot be read

  // When this returns without an error, all outputs are on their devices.
  void Write(Devices* devices, std::string* error) const {
    devices->Copy(copies, [error](const DeviceCopy&, const std::string& reason) { *error = reason; });
  }
};

bool WriteToDevice(
    const Slice& slice, void* buffer, int64_t device, std::unique_ptr<DeviceOutputs>* outputs, std::string* error) {
  const RecordTensor& tensor = *slice.tensor;
  if (!HasCudaRuntime()) {
    *error = std::string("output '") + tensor.name + "' is wanted in the memory of GPU " + std::to_string(device) +
             ", and no CUDA runtime (libcudart) is loaded in this process to copy it with";
    return false;
  }
  if (slice.length == 0) return true;
  if (*outputs == nullptr) *outputs = std::make_unique<DeviceOutputs>();
  const uint8_t* data = slice.data;
  if (tensor.dtype == TRITONSERVER_TYPE_BYTES) {
    // From here on the worker cannot change the copied strings any more.
    auto& kept = (*outputs)->strings.emplace_back(reinterpret_cast<const char*>(data), slice.length);
    data = reinterpret_cast<const uint8_t*>(kept.data());
    const std::string wrong = WrongStrings(data, slice.length, slice.elements);
    if (!wrong.empty()) {
      *error = std::string("output '") + tensor.name + "' of the worker: " + wrong;
      return false;
    }
  }
  (*outputs)->copies.push_back({tensor.name, true, buffer, data, slice.length, static_cast<int32_t>(device), 0});
  return true;
}

bool WriteOutput(
    TRITONBACKEND_Response* response, const Slice& slice, std::vector<int64_t>* dims,
    std::unique_ptr<DeviceOutputs>* on_devices, std::string* error) {
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
  if (buffer == nullptr && slice.length != 0) {
    *error = std::string("output '") + tensor.name + "': the server has no memory for its " +
             std::to_string(slice.length) + " bytes";
    return false;
  }
  if (memory == TRITONSERVER_MEMORY_GPU) return WriteToDevice(slice, buffer, device, on_devices, error);
  if (slice.length != 0) std::memcpy(buffer, slice.data, slice.length);
  if (tensor.dtype != TRITONSERVER_TYPE_BYTES) return true;
  // This checks the copy, which the worker cannot change any more.
  const std::string wrong = WrongStrings(static_cast<const uint8_t*>(buffer), slice.length, slice.elements);
  if (wrong.empty()) return true;
  *error = std::string("output '") + tensor.name + "' of the worker: " + wrong;
  return false;
}

bool WriteParameter(TRITONBACKEND_Response* response, const RecordParameter& parameter, std::string* error) {
  switch (parameter.type) {
    case TRITONSERVER_PARAMETER_STRING:
      return !Failed(TRITONBACKEND_ResponseSetStringParameter(response, parameter.key, parameter.text), error);
    case TRITONSERVER_PARAMETER_INT: {
      const auto value = static_cast<int64_t>(parameter.value);
      return !Failed(TRITONBACKEND_ResponseSetIntParameter(response, parameter.key, value), error);
    }
    case TRITONSERVER_PARAMETER_BOOL:
      return !Failed(TRITONBACKEND_ResponseSetBoolParameter(response, parameter.key, parameter.value != 0), error);
    default: {
      double value;
      std::memcpy(&value, &parameter.value, sizeof(value));
      return !Failed(TRITONBACKEND_ResponseSetDoubleParameter(response, parameter.key, value), error);
    }
  }
}

// Keeps the answer to a question in the cache. An answer without outputs is not kept. If the system has no memory for
// it, the next such question goes to the callable.
void Keep(
    ModelCache* cache, Question question, const Slices& slices, uint32_t first,
    const std::vector<RecordParameter>& parameters) {
  const uint64_t began_ns = NowNs();
  uint64_t bytes = question.bytes.size();
  for (uint32_t at = first; at != kNone; at = slices.all[at].next) bytes += slices.all[at].length;
  if (first == kNone || !cache->Fits(bytes)) return;
  try {
    CachedResponse response;
    for (uint32_t at = first; at != kNone; at = slices.all[at].next) {
      const Slice& slice = slices.all[at];
      CachedOutput& output = response.outputs.emplace_back();
      output.name = slice.tensor->name;
      output.dtype = slice.tensor->dtype;
      output.dims.assign(slice.tensor->dims, slice.tensor->dims + slice.tensor->dims_count);
      if (slice.rows >= 0) output.dims[0] = slice.rows;
      output.data.assign(reinterpret_cast<const char*>(slice.data), slice.length);
    }
    for (const auto& parameter : parameters) {
      const bool is_text = parameter.type == TRITONSERVER_PARAMETER_STRING;
      response.parameters.push_back({parameter.key, parameter.type, is_text ? parameter.text : "", parameter.value});
    }
    cache->Keep(std::move(question), std::move(response));
    if (cache->counter() != nullptr) cache->counter()->Kept(NowNs() - began_ns);
  } catch (const std::bad_alloc&) {
    PYTRITON_LOG(WARN, "no memory to keep an answer of " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace

void Batch::SendCached(Item* item, const CachedResponse& cached) {
  std::string error;
  TRITONBACKEND_Response* response = NewResponse(*item, &error);
  if (response == nullptr) return;  // the request goes on to the callable, and its response reports such an error
  std::vector<int64_t> dims;
  std::unique_ptr<DeviceOutputs> on_devices;
  for (const auto& output : cached.outputs) {
    RecordTensor tensor{};
    tensor.name = output.name.c_str();
    tensor.dtype = output.dtype;
    tensor.dims = output.dims.data();
    tensor.dims_count = static_cast<uint32_t>(output.dims.size());
    const auto* data = reinterpret_cast<const uint8_t*>(output.data.data());
    const Slice slice{&tensor, -1, data, output.data.size(), CountElements(tensor, 0), kNone};
    if (!WriteOutput(response, slice, &dims, &on_devices, &error)) break;
  }
  if (on_devices != nullptr && error.empty()) on_devices->Write(devices, &error);
  for (const auto& parameter : cached.parameters) {
    if (!error.empty()) break;
    WriteParameter(
        response, {parameter.key.c_str(), parameter.type, parameter.text.c_str(), parameter.value}, &error);
  }
  item->cached = true;
  item->open = false;
  item->ended = true;
  item->success = error.empty();
  Send(response, true, error.empty() ? nullptr : MakeError(TRITONSERVER_ERROR_INTERNAL, error));
}

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
      // Answers of an expired batch are dropped without a message, because the log says already that it took too long.
      if (expired || item.given_up) continue;
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
        SendError(item, TRITONSERVER_ERROR_UNAVAILABLE, "no response could be made: " + error);
        item.open = false;
      } else {
        uint64_t bytes = 0;
        std::unique_ptr<DeviceOutputs> on_devices;
        for (uint32_t at = chain.first; at != kNone; at = slices.all[at].next) {
          if (!WriteOutput(response, slices.all[at], &dims, &on_devices, &error)) break;
          bytes += slices.all[at].length;
        }
        if (on_devices != nullptr && error.empty()) on_devices->Write(devices, &error);
        record.Parameters(entry, &parameters);
        for (const auto& parameter : parameters) {
          if (!error.empty()) break;
          WriteParameter(response, parameter, &error);
        }
        TRITONSERVER_Error* failure =
            error.empty() ? nullptr : MakeError(TRITONSERVER_ERROR_INTERNAL, error);
        const bool last = final || failure != nullptr;
        item.success = failure == nullptr;
        // An answer is not kept if the caller has given up: the worker may have cut it short.
        if (item.success && item.question != nullptr && !item.cancelled && !IsCancelled(entry.request)) {
          Keep(cache, std::move(*item.question), slices, chain.first, parameters);
          item.question.reset();
        }
        if (last) {
          Send(response, last, failure);
        } else {
          SendToStream(item, response, bytes);
        }
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
      // Triton did not take the request back. This happens if the model has no iterative scheduler, or is being
      // unloaded. So the request is still ours and is answered with an error.
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
    // Requests that the cache has answered do not count as executed.
    if (!item.cached) rows += item.rows;
    any_success = any_success || (item.success && !item.cached);
    if (item.open || item.request == nullptr) continue;
    // If a request failed or was answered by the cache, the time of the worker says nothing about the cost of the whole
    // batch.
    if (!item.success || item.cached) cost = 0;
    ReportTo([&](TRITONBACKEND_ModelInstance* instance) {
      PYTRITON_LOG_IF_ERROR(
          TRITONBACKEND_ModelInstanceReportStatistics(
              instance, item.request, item.success, started_ns_, sent_ns, compute_end_ns, end_ns),
          "request statistics");
    });
    Release(item);
    --open_;
  }
  if (open_ == 0 && !reported_ && (any_success || counts_failures)) {
    reported_ = true;
    ReportTo([&](TRITONBACKEND_ModelInstance* instance) {
      PYTRITON_LOG_IF_ERROR(
          TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, rows, started_ns_, sent_ns, compute_end_ns, end_ns),
          "batch statistics");
    });
  }
  if (open_ == 0 && held_back != nullptr) {
    held_back->insert(held_back->end(), last_responses_.begin(), last_responses_.end());
    last_responses_.clear();
  } else {
    SendLast(&last_responses_);
  }
}

void Batch::PollCancelled(const Tell& tell) {
  for (uint32_t i = 0; i < size(); ++i) {
    Item& item = items_[i];
    item.cancelled = item.cancelled || IsCancelled(item);
    if (item.cancelled && !item.is_told) item.is_told = tell(i);
  }
}

void Batch::LookAtPaces(
    uint64_t most_waiting, int wake_fd, uint64_t now_ns, const std::function<bool(uint32_t, bool)>& tell) {
  for (uint32_t i = 0; i < size(); ++i) {
    StreamPace* const pace = items_[i].pace.get();
    if (pace == nullptr) continue;
    const bool was_paused = pace->is_paused();
    // If one request of a batch has ended, or its caller has left, the worker goes on with the other ones.
    const bool goes_on = items_[i].open && !items_[i].cancelled;
    if (!goes_on) pace->End();
    const bool pauses = goes_on && pace->Look(most_waiting, wake_fd, now_ns);
    // A stream that goes on after a pause has the worker's time limit begin again.
    if (was_paused && !pauses) active_ns_ = now_ns;
    if (pauses != pace->is_told && tell(i, pauses)) pace->is_told = pauses;
  }
}

bool Batch::is_paused() const {
  return std::any_of(items_.begin(), items_.end(), [](const Item& item) {
    return item.open && !item.cancelled && item.pace != nullptr && item.pace->is_paused();
  });
}

void Batch::EndStalled(
    uint64_t limit_ns, uint64_t now_ns, const std::function<std::string()>& text, const Tell& tell) {
  bool is_any = false;
  for (uint32_t i = 0; i < size(); ++i) {
    Item& item = items_[i];
    if (!item.open || item.cancelled || item.pace == nullptr || item.pace->stalled_ns(now_ns) < limit_ns) continue;
    SendError(item, TRITONSERVER_ERROR_CANCELLED, text());
    item.open = item.success = false;
    item.given_up = true;
    item.cancelled = is_any = true;
    item.is_told = tell(i);
  }
  if (is_any) Finish(now_ns);
}

bool Batch::IsCancelled(const Item& item) const {
  bool is_cancelled = false;
  return item.open &&
         Succeeded(
             item.factory != nullptr ? TRITONBACKEND_ResponseFactoryIsCancelled(item.factory, &is_cancelled)
                                     : TRITONBACKEND_RequestIsCancelled(item.request, &is_cancelled)) &&
         is_cancelled;
}

void Batch::CancelOpen(const Tell& tell) {
  for (Item& item : items_) item.cancelled = item.cancelled || item.open;
  PollCancelled(tell);
}

}  // namespace pytriton
