#include "requests.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "../proxy/wire/record.h"

namespace pytriton {
namespace {

using Error = TRITONSERVER_Error;
using Request = TRITONSERVER_InferenceRequest;
using Response = TRITONSERVER_InferenceResponse;
using Allocator = TRITONSERVER_ResponseAllocator;

std::atomic<EventCallback> event_callback{nullptr};

void Notify(uint64_t number, uint32_t events) {
  const auto callback = event_callback.load();
  if (callback != nullptr && events != 0) callback(number, events);
}

// ---- memory of outputs -------------------------------------------------------------------------------------------

// Lies before the elements of an output, whose memory belongs to Triton's response until it is taken over.
struct OutputHeader {
  bool taken;
};
static_assert(sizeof(OutputHeader) <= kOutputOffset, "the elements are aligned");

OutputHeader* NewOutput(size_t size) {
  void* memory = nullptr;
  if (size > SIZE_MAX - kOutputOffset) return nullptr;
  if (posix_memalign(&memory, kOutputOffset, kOutputOffset + size) != 0) return nullptr;
  return new (memory) OutputHeader{false};
}

void* ElementsOf(OutputHeader* header) { return reinterpret_cast<uint8_t*>(header) + kOutputOffset; }

Error* Allocate(
    Allocator*, const char*, size_t size, TRITONSERVER_MemoryType, int64_t, void*, void** elements, void** userp,
    TRITONSERVER_MemoryType* type, int64_t* device) {
  *type = TRITONSERVER_MEMORY_CPU;
  *device = 0;
  if (size == 0) return nullptr;
  OutputHeader* header = NewOutput(size);
  if (header == nullptr) {
    const std::string text = "no memory for an output of " + std::to_string(size) + " bytes";
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, text.c_str());
  }
  *elements = ElementsOf(header);
  *userp = header;
  return nullptr;
}

Error* Free(Allocator*, void*, void* userp, size_t, TRITONSERVER_MemoryType, int64_t) {
  auto* header = static_cast<OutputHeader*>(userp);
  if (header != nullptr && !header->taken) free(header);
  return nullptr;
}

Allocator* host_allocator = nullptr;

// ---- responses ---------------------------------------------------------------------------------------------------

Error* ReadParameters(Response* response, ReceivedResponse* received) {
  uint32_t count = 0;
  Error* error = TRITONSERVER_InferenceResponseParameterCount(response, &count);
  for (uint32_t i = 0; error == nullptr && i < count; ++i) {
    const char* key = nullptr;
    const void* value = nullptr;
    ReceivedParameter parameter;
    error = TRITONSERVER_InferenceResponseParameter(response, i, &key, &parameter.type, &value);
    if (error != nullptr) break;
    parameter.key = key;
    switch (parameter.type) {
      case TRITONSERVER_PARAMETER_STRING: parameter.text = static_cast<const char*>(value); break;
      case TRITONSERVER_PARAMETER_BOOL: parameter.number = *static_cast<const bool*>(value); break;
      case TRITONSERVER_PARAMETER_DOUBLE: parameter.real = *static_cast<const double*>(value); break;
      default: parameter.number = *static_cast<const int64_t*>(value);
    }
    received->parameters.push_back(std::move(parameter));
  }
  return error;
}

template <typename T>
size_t Largest(const void* data, size_t count) {
  const auto* values = static_cast<const T*>(data);
  return static_cast<size_t>(std::max_element(values, values + count) - values);
}

// The largest of numbers of half precision, in either format: a sign bit and a magnitude that grows with the other
// bits.
size_t LargestHalf(const void* data, size_t count) {
  const auto* values = static_cast<const int16_t*>(data);
  const auto order = [](int16_t bits) { return bits < 0 ? -(bits & 0x7FFF) : bits; };
  const auto less = [&](int16_t a, int16_t b) { return order(a) < order(b); };
  return static_cast<size_t>(std::max_element(values, values + count, less) - values);
}

size_t LargestOf(int type, const void* data, size_t count) {
  switch (type) {
    case 1:
    case 2: return Largest<uint8_t>(data, count);
    case 3: return Largest<uint16_t>(data, count);
    case 4: return Largest<uint32_t>(data, count);
    case 5: return Largest<uint64_t>(data, count);
    case 6: return Largest<int8_t>(data, count);
    case 7: return Largest<int16_t>(data, count);
    case 8: return Largest<int32_t>(data, count);
    case 9: return Largest<int64_t>(data, count);
    case 11: return Largest<float>(data, count);
    case 12: return Largest<double>(data, count);
    default: return LargestHalf(data, count);
  }
}

// Finds the label of the largest value of an output that is one row of numbers; "" if the model has no label for it.
std::string FindLabel(
    Response* response, uint32_t index, int type, const int64_t* dims, uint64_t dims_count, const void* data) {
  if (data == nullptr || dims_count == 0 || type == TRITONSERVER_TYPE_BYTES) return "";
  for (uint64_t d = 0; d + 1 < dims_count; ++d) {
    if (dims[d] != 1) return "";
  }
  const auto count = static_cast<size_t>(dims[dims_count - 1]);
  const auto label_of = [&](size_t chosen) -> std::string {
    const char* label = nullptr;
    const bool is_found =
        Succeeded(TRITONSERVER_InferenceResponseOutputClassificationLabel(response, index, chosen, &label));
    return is_found && label != nullptr ? label : "";
  };
  // A model with labels has one for the first class.
  if (count == 0 || label_of(0).empty()) return "";
  return label_of(LargestOf(type, data, count));
}

Error* ReadOutputs(Response* response, ReceivedResponse* received) {
  uint32_t count = 0;
  Error* error = TRITONSERVER_InferenceResponseOutputCount(response, &count);
  received->outputs.reserve(count);
  for (uint32_t i = 0; error == nullptr && i < count; ++i) {
    const char* name = nullptr;
    TRITONSERVER_DataType type = TRITONSERVER_TYPE_INVALID;
    const int64_t* dims = nullptr;
    uint64_t dims_count = 0;
    const void* base = nullptr;
    size_t size = 0;
    TRITONSERVER_MemoryType memory_type = TRITONSERVER_MEMORY_CPU;
    int64_t device = 0;
    void* userp = nullptr;
    error = TRITONSERVER_InferenceResponseOutput(
        response, i, &name, &type, &dims, &dims_count, &base, &size, &memory_type, &device, &userp);
    if (error != nullptr) break;
    const bool on_device = memory_type == TRITONSERVER_MEMORY_GPU;
    // A backend may have asked for more memory than the shape needs, so the size is computed from the shape. Strings
    // are checked where they are read.
    std::string text;
    if (!FitsShape(static_cast<uint32_t>(type), dims, dims_count, nullptr, size, &text)) {
      return TRITONSERVER_ErrorNew(
          TRITONSERVER_ERROR_INTERNAL, (std::string("output '") + name + "' of the response is " + text).c_str());
    }
    if (received->label.empty() && size != 0 && !on_device) {
      received->label = FindLabel(response, i, type, dims, dims_count, base);
    }
    OutputTensor output{name, type, {dims, dims + dims_count}, size, nullptr, const_cast<void*>(base)};
    // An empty output needs no memory, whatever its address is.
    if (size == 0) {
      output.data = nullptr;
    } else if (auto* header = static_cast<OutputHeader*>(userp); header != nullptr) {
      header->taken = true;
      output.memory.reset(header);
    } else if (!on_device) {
      OutputHeader* copy = NewOutput(size);
      if (copy == nullptr) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "no memory for an output");
      output.memory.reset(copy);
      output.data = ElementsOf(copy);
      std::memcpy(output.data, base, size);
    }
    received->outputs.push_back(std::move(output));
  }
  return error;
}

// Reads a response of Triton, which may be null, completely, and deletes it.
std::unique_ptr<ReceivedResponse> Read(Response* response, bool final) {
  std::unique_ptr<ReceivedResponse> unreadable;  // kept until Triton has released the memory in it
  auto received = std::make_unique<ReceivedResponse>();
  received->final = final;
  if (response == nullptr) return received;
  const char* name = nullptr;
  Error* error = TRITONSERVER_InferenceResponseModel(response, &name, &received->version);
  if (name != nullptr) received->model = name;
  if (error == nullptr) error = ReadParameters(response, received.get());
  Error* failure = error == nullptr ? TRITONSERVER_InferenceResponseError(response) : nullptr;
  if (error == nullptr && failure == nullptr) error = ReadOutputs(response, received.get());
  if (error != nullptr) {
    // If reading fails, the parts that were read before are not used.
    unreadable = std::move(received);
    received = std::make_unique<ReceivedResponse>();
    received->final = final;
    failure = error;
  }
  if (failure != nullptr) {
    received->failed = true;
    received->error_code = TRITONSERVER_ErrorCode(failure);
    received->error = TRITONSERVER_ErrorMessage(failure);
    TRITONSERVER_ErrorDelete(failure);
  }
  Succeeded(TRITONSERVER_InferenceResponseDelete(response));
  return received;
}

void Delete(Request* request) { Succeeded(TRITONSERVER_InferenceRequestDelete(request)); }

// ---- waiting -----------------------------------------------------------------------------------------------------

// If responses usually come within this time, a wait polls for so long before it sleeps, because waking up takes as
// long.
constexpr int64_t kSpinNs = 150000;

std::atomic<int> spinning{0};
std::atomic<int64_t> usual_wait_ns{0};

void NoteWait(uint64_t begin_ns) {
  const int64_t usual = usual_wait_ns.load(std::memory_order_relaxed);
  const auto this_one = static_cast<int64_t>(NowNs() - begin_ns);
  usual_wait_ns.store(usual + (std::min(this_one, 2 * kSpinNs) - usual) / 8, std::memory_order_relaxed);
}

}  // namespace

void PendingRequest::Spin(uint64_t begin_ns) const {
  static const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (usual_wait_ns.load(std::memory_order_relaxed) > kSpinNs) return;
  if (spinning.fetch_add(1) < cores / 2) {
    while (!HasArrived() && NowNs() - begin_ns < kSpinNs) std::this_thread::yield();
  }
  spinning.fetch_sub(1);
}

// ---- the life of a request ---------------------------------------------------------------------------------------

uint8_t* PendingRequest::Reserve(size_t length) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kOutputOffset, length) != 0) return nullptr;
  copies_.reset(memory);
  return static_cast<uint8_t*>(memory);
}

Error* PendingRequest::Create(
    TRITONSERVER_Server* server, const char* model, int64_t version, const std::vector<InputTensor>& inputs) {
  Request* request = nullptr;
  Error* error = TRITONSERVER_InferenceRequestNew(&request, server, model, version);
  for (auto input = inputs.begin(); error == nullptr && input != inputs.end(); ++input) {
    error = TRITONSERVER_InferenceRequestAddInput(request, input->name, input->type, input->dims, input->dims_count);
    if (error != nullptr) break;
    error = TRITONSERVER_InferenceRequestAppendInputData(
        request, input->name, input->data, input->size, input->memory_type, input->device);
  }
  if (error != nullptr && request != nullptr) {
    Delete(request);
    request = nullptr;
  }
  request_ = request;
  return error;
}

void PendingRequest::Unref() {
  if (owners_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

bool PendingRequest::Withdraw() {
  Request* request = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (submitted_) return false;
    std::swap(request, request_);
    ended_ = closed_ = true;
  }
  if (request != nullptr) Delete(request);
  return true;
}

Error* PendingRequest::Submit(
    TRITONSERVER_Server* server, TRITONSERVER_InferenceTrace* trace, Allocator* allocator, uint32_t events) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_ = events;
    if ((events & kResponded) != 0) tell_completed_ = true;
  }
  // An allocator written in Python gets the number by which Python knows the request.
  void* userp = allocator == nullptr ? nullptr : reinterpret_cast<void*>(number_);
  Error* error = TRITONSERVER_InferenceRequestSetReleaseCallback(request_, OnRelease, this);
  if (error == nullptr) {
    error = TRITONSERVER_InferenceRequestSetResponseCallback(
        request_, allocator == nullptr ? host_allocator : allocator, userp, OnResponse, this);
  }
  if (error == nullptr) {
    owners_.fetch_add(1, std::memory_order_relaxed);
    error = TRITONSERVER_ServerInferAsync(server, request_, trace);
    if (error != nullptr) owners_.fetch_sub(1, std::memory_order_relaxed);
  }
  if (error != nullptr) {
    Withdraw();
    return error;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  submitted_ = true;
  if (cancelled_ && request_ != nullptr) Succeeded(TRITONSERVER_InferenceRequestCancel(request_));
  return nullptr;
}

bool PendingRequest::Enqueue(std::unique_ptr<ReceivedResponse> response) {
  if (closed_) return false;
  closed_ = response->final;
  responses_.push_back(std::move(response));
  arrived_.store(true, std::memory_order_release);
  return true;
}

void PendingRequest::Complete(Request* request) {
  Delete(request);
  bool told = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    told = tell_completed_;
  }
  if (told) Notify(number_, kCompleted);
  Unref();
}

void PendingRequest::OnResponse(Response* response, uint32_t flags, void* userp) {
  auto* self = static_cast<PendingRequest*>(userp);
  const bool final = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  self->owners_.fetch_add(1, std::memory_order_relaxed);
  auto received = Read(response, final);
  Request* released = nullptr;
  if (final) {
    const std::lock_guard<std::mutex> lock(self->mutex_);
    if (self->released_) std::swap(released, self->request_);
  }
  // This comes before a waiting thread is woken, because that may unload the model to which the request refers.
  if (released != nullptr) Delete(released);
  Request* left = nullptr;
  uint32_t events = 0;
  {
    const std::lock_guard<std::mutex> lock(self->mutex_);
    const bool enqueued = self->Enqueue(std::move(received));
    if (enqueued && (self->events_ & kResponded) != 0) events |= kResponded;
    if (final) {
      self->answered_ = true;
      if (released != nullptr) {
        self->ended_ = true;
        if (self->tell_completed_) events |= kCompleted;
      } else if (self->released_) {
        std::swap(left, self->request_);
      }
    }
  }
  self->changed_.notify_all();
  Notify(self->number_, events);
  if (left != nullptr) self->Complete(left);
  if (released != nullptr) self->Unref();
  self->Unref();
}

void PendingRequest::OnRelease(Request*, uint32_t, void* userp) {
  auto* self = static_cast<PendingRequest*>(userp);
  if ((self->events_ & kReleased) != 0) Notify(self->number_, kReleased);
  Request* answered = nullptr;
  {
    const std::lock_guard<std::mutex> lock(self->mutex_);
    self->released_ = true;
    if (self->answered_) std::swap(answered, self->request_);
  }
  if (answered != nullptr) self->Complete(answered);
}

PendingRequest::Taken PendingRequest::Take(int64_t timeout_ns, std::unique_ptr<ReceivedResponse>* response) {
  const uint64_t begin_ns = NowNs();
  if (timeout_ns > 0 && !HasArrived()) Spin(begin_ns);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_over = [this] { return !responses_.empty() || closed_; };
  if (timeout_ns > 0 && !is_over()) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    changed_.wait_until(lock, deadline, is_over);
  }
  if (responses_.empty()) return closed_ ? Taken::kNothingMore : Taken::kNothingYet;
  *response = std::move(responses_.front());
  responses_.pop_front();
  arrived_.store(!responses_.empty() || closed_, std::memory_order_release);
  if ((*response)->final) {
    if (ended_) {
      (*response)->completed = true;
    } else {
      tell_completed_ = true;
    }
  }
  lock.unlock();
  if (timeout_ns > 0) NoteWait(begin_ns);
  return Taken::kResponse;
}

bool PendingRequest::Cancel() {
  bool told = false;
  bool ended = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) {
      auto response = std::make_unique<ReceivedResponse>();
      response->final = response->cancelled = true;
      told = Enqueue(std::move(response)) && (events_ & kResponded) != 0;
      cancelled_ = true;
      if (request_ != nullptr && submitted_) Succeeded(TRITONSERVER_InferenceRequestCancel(request_));
    }
    ended = ended_;
    tell_completed_ = true;
  }
  changed_.notify_all();
  if (told) Notify(number_, kResponded);
  return ended;
}

// ---- for the process ---------------------------------------------------------------------------------------------

TRITONSERVER_Error* MakeHostAllocator() {
  return host_allocator == nullptr ? TRITONSERVER_ResponseAllocatorNew(&host_allocator, Allocate, Free, nullptr) : nullptr;
}

void SetEventCallback(EventCallback callback) { event_callback = callback; }

}  // namespace pytriton
