// Requests of the process to Triton, from their submission to their last response. Triton's threads leave what comes in
// a queue for each request, read and independent of Triton, and wake whoever waits there: none of that takes the GIL.
// Python is called only for what it asked to be told.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../src/triton_util.h"

#define PYTRITON_EXPORT extern "C" __attribute__((visibility("default")))

struct TRITONSERVER_InferenceResponse;
struct TRITONSERVER_ResponseAllocator;
struct TRITONSERVER_Server;

namespace pytriton {
namespace {

using Error = TRITONSERVER_Error;
using Request = TRITONSERVER_InferenceRequest;
using Response = TRITONSERVER_InferenceResponse;
using Allocator = TRITONSERVER_ResponseAllocator;

using AllocFn = Error* (*)(Allocator*, const char*, size_t, int, int64_t, void*, void**, void**, int*, int64_t*);
using FreeFn = Error* (*)(Allocator*, void*, void*, size_t, int, int64_t);
using ReleaseFn = void (*)(Request*, uint32_t, void*);
using CompleteFn = void (*)(Response*, uint32_t, void*);

// The functions of Triton that requests need, as those for backends are in `triton_table`.
#define PYTRITON_CALL_FUNCTIONS(ENTRY)                                                                             \
  ENTRY(ErrorCode, int(Error*))                                                                                    \
  ENTRY(ErrorDelete, void(Error*))                                                                                 \
  ENTRY(ErrorMessage, const char*(Error*))                                                                         \
  ENTRY(ErrorNew, Error*(int, const char*))                                                                        \
  ENTRY(InferenceRequestCancel, Error*(Request*))                                                                  \
  ENTRY(InferenceRequestDelete, Error*(Request*))                                                                  \
  ENTRY(InferenceRequestNew, Error*(Request**, TRITONSERVER_Server*, const char*, int64_t))                        \
  ENTRY(InferenceRequestSetReleaseCallback, Error*(Request*, ReleaseFn, void*))                                    \
  ENTRY(InferenceRequestSetResponseCallback, Error*(Request*, Allocator*, void*, CompleteFn, void*))               \
  ENTRY(InferenceResponseDelete, Error*(Response*))                                                                \
  ENTRY(InferenceResponseError, Error*(Response*))                                                                 \
  ENTRY(InferenceResponseModel, Error*(Response*, const char**, int64_t*))                                         \
  ENTRY(InferenceResponseOutput, Error*(Response*, uint32_t, const char**, int*, const int64_t**, uint64_t*,       \
                                        const void**, size_t*, int*, int64_t*, void**))                            \
  ENTRY(InferenceResponseOutputClassificationLabel, Error*(Response*, uint32_t, size_t, const char**))              \
  ENTRY(InferenceResponseOutputCount, Error*(Response*, uint32_t*))                                                \
  ENTRY(InferenceResponseParameter, Error*(Response*, uint32_t, const char**, int*, const void**))                 \
  ENTRY(InferenceResponseParameterCount, Error*(Response*, uint32_t*))                                             \
  ENTRY(ResponseAllocatorNew, Error*(Allocator**, AllocFn, FreeFn, void*))                                         \
  ENTRY(ServerInferAsync, Error*(TRITONSERVER_Server*, Request*, TRITONSERVER_InferenceTrace*))

struct Functions {
#define PYTRITON_DECLARE(name, ...) std::add_pointer_t<__VA_ARGS__> name;
  PYTRITON_CALL_FUNCTIONS(PYTRITON_DECLARE)
#undef PYTRITON_DECLARE
} triton;

// What Python is told of a request, in the thread in which it happens.
enum Event : uint32_t {
  kReleased = 1,  // Triton has no more need of the inputs; the request is still there
  kArrived = 2,   // there is a response in the queue
  kEnded = 4,     // Triton has done with the request, and it is deleted
};

enum Wish : uint32_t {
  kTellReleased = 1,
  kTellArrived = 2,  // and when it has ended
};

std::atomic<void (*)(uint64_t, uint32_t)> tell{nullptr};

void Tell(uint64_t number, uint32_t events) {
  const auto function = tell.load();
  if (function != nullptr && events != 0) function(number, events);
}

// ---- memory of outputs -------------------------------------------------------------------------------------------

constexpr size_t kAlignment = 64;
// Outputs up to this size are copied into the record of their response.
constexpr size_t kInline = 4096;

// Memory for an output as long as it belongs to Triton's response.
struct Buffer {
  void* memory;
};

Error* Allocate(
    Allocator*, const char*, size_t size, int, int64_t, void*, void** memory, void** userp, int* type,
    int64_t* device) {
  *type = TRITONSERVER_MEMORY_CPU;
  *device = 0;
  if (size == 0) return nullptr;
  if (posix_memalign(memory, kAlignment, size) != 0) {
    *memory = nullptr;
    const std::string text = "no memory for an output of " + std::to_string(size) + " bytes";
    return triton.ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, text.c_str());
  }
  *userp = new Buffer{*memory};
  return nullptr;
}

Error* Free(Allocator*, void*, void* userp, size_t, int, int64_t) {
  auto* buffer = static_cast<Buffer*>(userp);
  if (buffer != nullptr) free(buffer->memory);
  delete buffer;
  return nullptr;
}

Allocator* host_allocator = nullptr;

// ---- responses ---------------------------------------------------------------------------------------------------

// A response as Python gets it, without anything of Triton's. `_response.py` of pytriton.inprocess reads the same bytes.
enum RecordFlag : uint32_t {
  kFinal = 1,
  kFailed = 2,     // `text` is the error
  kCancelled = 4,  // stands for the responses that nobody waits for any more
  kOver = 8,       // the request has ended, which Python is not told in any other way
};

#pragma pack(push, 1)
struct RecordHeader {
  uint64_t length;
  uint32_t flags;
  uint32_t error_code;
  int64_t version;
  uint32_t name_length;
  uint32_t text_length;
  uint32_t parameter_count;
  uint32_t output_count;
  uint32_t label_length;  // of the label of the largest value, which comes last
};
struct RecordParameter {
  uint32_t type;
  uint32_t key_length;
  uint64_t value_length;
};
struct RecordOutput {
  uint64_t address;  // 0: the contents follow
  uint64_t size;
  uint32_t type;
  uint32_t dims_count;
  uint32_t name_length;
};
#pragma pack(pop)

class Record {
 public:
  Record() { bytes_.resize(sizeof(RecordHeader)); }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;
  ~Record() {
    for (void* memory : memories_) free(memory);
  }

  void Add(const void* data, size_t length) {
    if (length == 0) return;
    const auto* begin = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), begin, begin + length);
  }
  void Own(void* memory) { memories_.push_back(memory); }
  // The reader has taken over the memory of all outputs.
  void Disown() { memories_.clear(); }
  void Close(RecordHeader header) {
    header.length = bytes_.size();
    std::memcpy(bytes_.data(), &header, sizeof(header));
  }
  void AddFlag(uint32_t flag) {
    auto* header = reinterpret_cast<RecordHeader*>(bytes_.data());
    header->flags |= flag;
  }
  bool IsFinal() const { return (reinterpret_cast<const RecordHeader*>(bytes_.data())->flags & kFinal) != 0; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
  std::vector<void*> memories_;
};

Error* ReadParameters(Response* response, Record* record, RecordHeader* header) {
  Error* error = triton.InferenceResponseParameterCount(response, &header->parameter_count);
  for (uint32_t i = 0; error == nullptr && i < header->parameter_count; ++i) {
    const char* key = nullptr;
    const void* value = nullptr;
    int type = 0;
    error = triton.InferenceResponseParameter(response, i, &key, &type, &value);
    if (error != nullptr) break;
    RecordParameter entry{static_cast<uint32_t>(type), static_cast<uint32_t>(strlen(key)), 8};
    if (type == TRITONSERVER_PARAMETER_STRING) entry.value_length = strlen(static_cast<const char*>(value));
    if (type == TRITONSERVER_PARAMETER_BOOL) entry.value_length = 1;
    record->Add(&entry, sizeof(entry));
    record->Add(key, entry.key_length);
    record->Add(value, entry.value_length);
  }
  return error;
}

template <typename T>
size_t Largest(const void* data, size_t count) {
  const auto* values = static_cast<const T*>(data);
  return static_cast<size_t>(std::max_element(values, values + count) - values);
}

// Half precision in both forms: a sign and a magnitude, which grows with the other bits.
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

// Finds the label of the largest value of an output that is one row of numbers; "" where the model has none for it.
std::string FindLabel(
    Response* response, uint32_t index, int type, const int64_t* dims, uint64_t dims_count, const void* data) {
  if (data == nullptr || dims_count == 0 || type == TRITONSERVER_TYPE_BYTES) return "";
  for (uint64_t d = 0; d + 1 < dims_count; ++d) {
    if (dims[d] != 1) return "";
  }
  const auto count = static_cast<size_t>(dims[dims_count - 1]);
  const auto label_of = [&](size_t chosen) -> std::string {
    const char* label = nullptr;
    Error* error = triton.InferenceResponseOutputClassificationLabel(response, index, chosen, &label);
    if (error != nullptr) triton.ErrorDelete(error);
    return error != nullptr || label == nullptr ? "" : label;
  };
  // Whoever has labels has one for the first class.
  if (count == 0 || label_of(0).empty()) return "";
  return label_of(LargestOf(type, data, count));
}

Error* ReadOutputs(Response* response, Record* record, RecordHeader* header) {
  Error* error = triton.InferenceResponseOutputCount(response, &header->output_count);
  std::string label;
  for (uint32_t i = 0; error == nullptr && i < header->output_count; ++i) {
    const char* name = nullptr;
    int type = 0;
    const int64_t* dims = nullptr;
    uint64_t dims_count = 0;
    const void* base = nullptr;
    size_t size = 0;
    int memory_type = 0;
    int64_t device = 0;
    void* userp = nullptr;
    error = triton.InferenceResponseOutput(
        response, i, &name, &type, &dims, &dims_count, &base, &size, &memory_type, &device, &userp);
    if (error != nullptr) break;
    RecordOutput entry{reinterpret_cast<uint64_t>(base), size, static_cast<uint32_t>(type),
                       static_cast<uint32_t>(dims_count), static_cast<uint32_t>(strlen(name))};
    if (label.empty() && size != 0 && memory_type != TRITONSERVER_MEMORY_GPU) {
      label = FindLabel(response, i, type, dims, dims_count, base);
    }
    auto* buffer = static_cast<Buffer*>(userp);
    // An empty output has no memory, whatever its address is.
    const bool is_ours = buffer != nullptr && size > kInline;
    const bool is_inline = size == 0 || (!is_ours && memory_type != TRITONSERVER_MEMORY_GPU);
    if (is_inline) {
      entry.address = 0;
    } else if (is_ours) {
      record->Own(buffer->memory);
      buffer->memory = nullptr;
    }
    record->Add(&entry, sizeof(entry));
    record->Add(dims, dims_count * sizeof(int64_t));
    record->Add(name, entry.name_length);
    if (is_inline) record->Add(base, entry.size);
  }
  header->label_length = static_cast<uint32_t>(label.size());
  record->Add(label.data(), label.size());
  return error;
}

// Reads all of a response of Triton, which may be null, and deletes it.
std::unique_ptr<Record> Read(Response* response, bool final) {
  auto record = std::make_unique<Record>();
  RecordHeader header{};
  if (final) header.flags = kFinal;
  if (response == nullptr) {
    record->Close(header);
    return record;
  }
  const char* name = nullptr;
  Error* error = triton.InferenceResponseModel(response, &name, &header.version);
  if (name != nullptr) {
    header.name_length = static_cast<uint32_t>(strlen(name));
    record->Add(name, header.name_length);
  }
  if (error == nullptr) error = ReadParameters(response, record.get(), &header);
  Error* failure = error == nullptr ? triton.InferenceResponseError(response) : error;
  if (failure == nullptr) failure = error = ReadOutputs(response, record.get(), &header);
  if (failure != nullptr) {
    // Parts that were read before an error of the reading itself are not to be relied on.
    if (error != nullptr) {
      record = std::make_unique<Record>();
      header.name_length = header.parameter_count = header.output_count = header.label_length = 0;
    }
    const char* text = triton.ErrorMessage(failure);
    header.flags |= kFailed;
    header.error_code = static_cast<uint32_t>(triton.ErrorCode(failure));
    header.text_length = static_cast<uint32_t>(strlen(text));
    record->Add(text, header.text_length);
    if (error != nullptr) triton.ErrorDelete(error);  // that of a response belongs to the response
  }
  record->Close(header);
  error = triton.InferenceResponseDelete(response);
  if (error != nullptr) triton.ErrorDelete(error);
  return record;
}

// ---- calls -------------------------------------------------------------------------------------------------------

// One request. It belongs to Python, which drops it, and to Triton until both of its ends: that Triton has released the
// request, and has given its last response. They come in any order.
struct Call {
  uint64_t number;
  uint32_t wishes;
  std::atomic<int> owners{2};
  std::atomic<bool> arrived{false};  // for those that wait without the lock: look again
  std::mutex mutex;
  std::condition_variable changed;
  // All below: with the lock.
  Request* request = nullptr;
  std::deque<std::unique_ptr<Record>> records;
  bool submitted = false;
  bool released = false;
  bool answered = false;
  bool ended = false;
  bool cancelled = false;
  bool closed = false;  // nothing more comes into the queue
  bool tell_ended = false;
};

void Drop(Call* call) {
  if (call->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete call;
}

void Delete(Request* request) {
  Error* error = triton.InferenceRequestDelete(request);
  if (error == nullptr) return;
  triton.ErrorDelete(error);
}

// Puts a record into the queue, unless its last one is there: that of a cancelled request comes before Triton's. With
// the lock; whoever holds it wakes those that wait afterwards.
bool Put(Call* call, std::unique_ptr<Record> record) {
  if (call->closed) return false;
  call->closed = record->IsFinal();
  call->records.push_back(std::move(record));
  call->arrived.store(true, std::memory_order_release);
  return true;
}

void End(Call* call, Request* request) {
  Delete(request);
  bool told = false;
  {
    const std::lock_guard<std::mutex> lock(call->mutex);
    call->ended = true;
    told = call->tell_ended;
  }
  if (told) Tell(call->number, kEnded);
  Drop(call);
}

void OnComplete(Response* response, uint32_t flags, void* userp) {
  auto* call = static_cast<Call*>(userp);
  const bool final = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  call->owners.fetch_add(1, std::memory_order_relaxed);
  auto record = Read(response, final);
  Request* released = nullptr;
  if (final) {
    const std::lock_guard<std::mutex> lock(call->mutex);
    if (call->released) std::swap(released, call->request);
  }
  // Before anybody is woken, who might unload the model that it refers to.
  if (released != nullptr) Delete(released);
  Request* left = nullptr;
  uint32_t events = 0;
  {
    const std::lock_guard<std::mutex> lock(call->mutex);
    const bool put = Put(call, std::move(record));
    if (put && (call->wishes & kTellArrived) != 0) events |= kArrived;
    if (final) {
      call->answered = true;
      if (released != nullptr) {
        call->ended = true;
        if (call->tell_ended) events |= kEnded;
      } else if (call->released) {
        std::swap(left, call->request);
      }
    }
  }
  call->changed.notify_all();
  Tell(call->number, events);
  if (left != nullptr) End(call, left);
  if (released != nullptr) Drop(call);
  Drop(call);
}

void OnRelease(Request*, uint32_t, void* userp) {
  auto* call = static_cast<Call*>(userp);
  if ((call->wishes & kTellReleased) != 0) Tell(call->number, kReleased);
  Request* answered = nullptr;
  {
    const std::lock_guard<std::mutex> lock(call->mutex);
    call->released = true;
    if (call->answered) std::swap(answered, call->request);
  }
  if (answered != nullptr) End(call, answered);
}

// ---- waiting -----------------------------------------------------------------------------------------------------

// Where answers come this fast, whoever waits does not sleep first: to be woken takes as long again.
constexpr int64_t kSpinNs = 150000;

std::atomic<int> spinning{0};
std::atomic<int64_t> usual_wait_ns{0};

void Spin(const Call* call, uint64_t begin_ns) {
  static const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (usual_wait_ns.load(std::memory_order_relaxed) > kSpinNs) return;
  if (spinning.fetch_add(1) < cores / 2) {
    while (!call->arrived.load(std::memory_order_acquire) && NowNs() - begin_ns < kSpinNs) std::this_thread::yield();
  }
  spinning.fetch_sub(1);
}

void NoteWait(uint64_t begin_ns) {
  const int64_t usual = usual_wait_ns.load(std::memory_order_relaxed);
  const auto this_one = static_cast<int64_t>(NowNs() - begin_ns);
  usual_wait_ns.store(usual + (std::min(this_one, 2 * kSpinNs) - usual) / 8, std::memory_order_relaxed);
}

}  // namespace
}  // namespace pytriton

using namespace pytriton;

// ---- for the process ---------------------------------------------------------------------------------------------

// Finds Triton's functions in the library behind `library`, a handle of dlopen. Returns the name of one that is missing.
PYTRITON_EXPORT const char* pytriton_inprocess_open_calls(void* library, void (*told)(uint64_t, uint32_t)) {
#define PYTRITON_FIND(name, ...)                                                                             \
  triton.name = reinterpret_cast<decltype(triton.name)>(dlsym(library, "TRITONSERVER_" #name)); \
  if (triton.name == nullptr) return "TRITONSERVER_" #name;
  PYTRITON_CALL_FUNCTIONS(PYTRITON_FIND)
#undef PYTRITON_FIND
  if (host_allocator == nullptr) {
    Error* error = triton.ResponseAllocatorNew(&host_allocator, Allocate, Free, nullptr);
    if (error != nullptr) return "TRITONSERVER_ResponseAllocatorNew";
  }
  tell = told;
  return nullptr;
}

// The interpreter is about to end: from now on nothing of Python is called.
PYTRITON_EXPORT void pytriton_inprocess_close_calls() { tell = nullptr; }

// Makes a request, which belongs to the caller until it is submitted: `made` gets the call and Triton's request.
PYTRITON_EXPORT Error* pytriton_inprocess_new_call(
    TRITONSERVER_Server* server, const char* model, int64_t version, uint64_t number, void** made) {
  Request* request = nullptr;
  Error* error = triton.InferenceRequestNew(&request, server, model, version);
  if (error != nullptr) return error;
  auto* call = new Call;
  call->number = number;
  call->request = request;
  made[0] = call;
  made[1] = request;
  return nullptr;
}

// Deletes a request that Triton has not got, or has not accepted. Does nothing the second time.
PYTRITON_EXPORT void pytriton_inprocess_withdraw_call(Call* call) {
  Request* request = nullptr;
  {
    const std::lock_guard<std::mutex> lock(call->mutex);
    std::swap(request, call->request);
    call->ended = call->closed = true;
  }
  if (request == nullptr) return;
  Delete(request);
  Drop(call);
}

// Gives a request to Triton. One that is not accepted is withdrawn. `allocator` is null for outputs in host memory.
PYTRITON_EXPORT Error* pytriton_inprocess_submit_call(
    Call* call, TRITONSERVER_Server* server, TRITONSERVER_InferenceTrace* trace, Allocator* allocator,
    uint32_t wishes) {
  Request* request = call->request;
  call->wishes = wishes;
  if ((wishes & kTellArrived) != 0) call->tell_ended = true;
  // What an allocator of Python's gets is what Python is told of a request.
  void* userp = allocator == nullptr ? nullptr : reinterpret_cast<void*>(call->number);
  Error* error = triton.InferenceRequestSetReleaseCallback(request, OnRelease, call);
  if (error == nullptr) {
    error = triton.InferenceRequestSetResponseCallback(
        request, allocator == nullptr ? host_allocator : allocator, userp, OnComplete, call);
  }
  if (error == nullptr) error = triton.ServerInferAsync(server, request, trace);
  if (error != nullptr) {
    pytriton_inprocess_withdraw_call(call);
    return error;
  }
  const std::lock_guard<std::mutex> lock(call->mutex);
  call->submitted = true;
  if (call->cancelled && call->request != nullptr) {
    error = triton.InferenceRequestCancel(call->request);
    if (error != nullptr) triton.ErrorDelete(error);
  }
  return nullptr;
}

struct Taken {
  Record* record;  // to be given to `free_record`
  const uint8_t* bytes;
  uint64_t length;
};

// Waits for the next response. Returns 1 with it, 0 after `timeout_ns` without one, and -1 where none will come.
PYTRITON_EXPORT int pytriton_inprocess_take_record(Call* call, int64_t timeout_ns, Taken* taken) {
  const uint64_t begin_ns = NowNs();
  if (timeout_ns > 0 && !call->arrived.load(std::memory_order_acquire)) Spin(call, begin_ns);
  std::unique_lock<std::mutex> lock(call->mutex);
  const auto is_over = [call] { return !call->records.empty() || call->closed; };
  if (timeout_ns > 0 && !is_over()) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    call->changed.wait_until(lock, deadline, is_over);
  }
  if (call->records.empty()) return call->closed ? -1 : 0;
  Record* record = call->records.front().release();
  call->records.pop_front();
  call->arrived.store(!call->records.empty() || call->closed, std::memory_order_release);
  if (record->IsFinal()) {
    if (call->ended) {
      record->AddFlag(kOver);
    } else {
      call->tell_ended = true;
    }
  }
  lock.unlock();
  if (timeout_ns > 0) NoteWait(begin_ns);
  *taken = {record, record->bytes().data(), record->bytes().size()};
  return 1;
}

// Deletes a record that was read. The memory of its outputs belongs to the reader.
PYTRITON_EXPORT void pytriton_inprocess_free_record(Record* record) {
  record->Disown();
  delete record;
}

// Deletes the memory of an output.
PYTRITON_EXPORT void pytriton_inprocess_free_memory(void* memory) { free(memory); }

// Ends the wait for a request and asks Triton to stop the work for it. Returns 1 where it has ended; else Python is told
// when it does.
PYTRITON_EXPORT int pytriton_inprocess_cancel_call(Call* call) {
  bool arrived = false;
  int ended = 0;
  {
    const std::lock_guard<std::mutex> lock(call->mutex);
    if (!call->closed) {
      auto record = std::make_unique<Record>();
      RecordHeader header{};
      header.flags = kFinal | kCancelled;
      record->Close(header);
      arrived = Put(call, std::move(record)) && (call->wishes & kTellArrived) != 0;
      call->cancelled = true;
      if (call->request != nullptr && call->submitted) {
        Error* error = triton.InferenceRequestCancel(call->request);
        if (error != nullptr) triton.ErrorDelete(error);
      }
    }
    ended = call->ended ? 1 : 0;
    call->tell_ended = true;
  }
  call->changed.notify_all();
  if (arrived) Tell(call->number, kArrived);
  return ended;
}

// Lets go of a call. Its request goes on, if it has not ended.
PYTRITON_EXPORT void pytriton_inprocess_drop_call(Call* call) { Drop(call); }
