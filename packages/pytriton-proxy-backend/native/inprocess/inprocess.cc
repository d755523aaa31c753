// A backend for Triton inside a Python process. Its entry points call Python functions that the process has set, and
// the answers of the process go straight into Triton's response buffers. Batches and answers are records of the proxy's
// protocol, in the memory of the process.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../proxy/batch/batch.h"
#include "../proxy/cache/cache_metrics.h"
#include "../proxy/triton/triton_util.h"
#include "../proxy/wire/record.h"
#include "lane.h"
#include "requests.h"

#define PYTRITON_EXPORT extern "C" __attribute__((visibility("default")))

namespace pytriton {

#define PYTRITON_DEFINE(name) decltype(&::name) name;
PYTRITON_TRITON_FUNCTIONS(PYTRITON_DEFINE)
PYTRITON_OPTIONAL_TRITON_FUNCTIONS(PYTRITON_DEFINE)
#undef PYTRITON_DEFINE

namespace {

const char* FindFunctions(void* triton) {
#define PYTRITON_FIND(name) name = reinterpret_cast<decltype(name)>(dlsym(triton, #name));
#define PYTRITON_FIND_OR_FAIL(name) \
  PYTRITON_FIND(name)               \
  if (name == nullptr) return #name;
  PYTRITON_TRITON_FUNCTIONS(PYTRITON_FIND_OR_FAIL)
  PYTRITON_OPTIONAL_TRITON_FUNCTIONS(PYTRITON_FIND)
  // This library brings the CUDA runtime whose memory and streams its backends use; other libraries may bring other
  // ones.
  PreferCudaRuntimeOf(triton);
  return Succeeded(MakeHostAllocator()) ? nullptr : "TRITONSERVER_ResponseAllocatorNew";
}

struct InPlace {
  uint64_t tensor;  // the tensor's place in the record
  const void* data;
};

// Functions of Python, none of which raises.
struct Hooks {
  // (folder, version) -> the model, and (model, address of the instance) -> its token; 0 if the process refuses, with
  // the reason in `refuse`.
  PyObject* load_model;
  PyObject* load_instance;
  PyObject* unload_model;     // (model)
  PyObject* unload_instance;  // (token)
  PyObject* make_room;        // (token, length): makes the slab of an instance at least so large
  // (token, batch, request, list of tensors that are not in the record, by place and address): takes the batch over,
  // which belongs to the process from then on.
  PyObject* execute;
} hooks;

constexpr int kGilLocked = 0;
constexpr int kGilUnlocked = 1;

// Python may be called only while this is true: after `connect`, until the interpreter is about to end.
std::atomic<bool> connected{false};
thread_local std::string refusal;

// Gives a thread of Triton a Python thread state for its whole life. Otherwise each call would make a new one, and
// thread-local data (`threading.local`, the current event loop) would be lost after each batch.
struct PythonThread {
  bool made = false;

  void Enter() {
    if (made) return;
    PyGILState_Ensure();
    PyEval_SaveThread();
    made = true;
  }

  ~PythonThread() {
    if (!made || !connected) return;
    PyGILState_Ensure();
    PyGILState_Release(kGilLocked);
    PyGILState_Release(kGilUnlocked);
  }
};

thread_local PythonThread python_thread;

// Calls a hook with new references, which it takes over. Returns the hook's number, 0 for None or an exception.
template <typename... Objects>
uint64_t CallHook(PyObject* hook, Objects... arguments) {
  const Ref result(Call(hook, arguments...));
  const uint64_t number = result && result.get() != &_Py_NoneStruct ? PyLong_AsUnsignedLongLong(result.get()) : 0;
  if (PyErr_Occurred() == nullptr) return number;
  PyErr_WriteUnraisable(hook);
  return 0;
}

// Guards the list of Triton's threads that run Python for a batch.
std::mutex executing_mutex;
std::set<pthread_t> executing;

class ExecutingThread {
 public:
  ExecutingThread() {
    const std::lock_guard<std::mutex> lock(executing_mutex);
    executing.insert(pthread_self());
  }
  ~ExecutingThread() {
    const std::lock_guard<std::mutex> lock(executing_mutex);
    executing.erase(pthread_self());
  }
  ExecutingThread(const ExecutingThread&) = delete;
  ExecutingThread& operator=(const ExecutingThread&) = delete;
};

// The last responses of the batch for which this thread runs Python. They are sent after Python has returned; otherwise
// their callers would wake up and compete for the GIL with the rest of the work.
struct DeferredResponses {
  LastResponses responses;
  bool open = false;
};

thread_local DeferredResponses deferred;

void ParkThread(int) {
  for (;;) pause();
}

std::atomic<uint64_t> in_flight{0};  // batches of all models; nothing reads it here

// A batch that belongs to the process, which may ask about it from any thread.
struct OwnedBatch {
  OwnedBatch(std::unique_ptr<Batch> batch, bool decoupled) : decoupled(decoupled), batch(std::move(batch)) {}

  uint64_t Id() const { return reinterpret_cast<uint64_t>(this); }

  bool decoupled;
  std::mutex mutex;
  const std::unique_ptr<Batch> batch;
};

// The caches of loaded models; instances of a model share one. Guarded by the GIL.
std::map<const void*, std::weak_ptr<ModelCache>> caches;

TRITONSERVER_Error* CacheOf(
    TRITONBACKEND_Model* model, const void* key, uint64_t bytes, std::shared_ptr<ModelCache>* cache) {
  *cache = caches[key].lock();
  if (*cache != nullptr) return nullptr;
  const char* name = nullptr;
  uint64_t version = 0;
  if (auto* error = TRITONBACKEND_ModelName(model, &name)) return error;
  if (auto* error = TRITONBACKEND_ModelVersion(model, &version)) return error;
  *cache = std::make_shared<ModelCache>(bytes, NewCacheMetrics(name, version));
  caches[key] = *cache;
  return nullptr;
}

TRITONSERVER_Error* Refused(const char* what) {
  std::string text = std::string("pytriton.inprocess: ") + what;
  if (!connected) {
    text += ": this backend serves callables of the process that runs Triton, and there is no Python to call";
  } else {
    text += refusal.empty() ? ": the log of the process says why" : ": " + refusal;
  }
  refusal.clear();
  return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, text);
}

// Sends the responses in a record. `payloads` has the addresses of those payloads that do not lie in the record, 0 for
// the other ones; it is empty if all lie in it. To be called without the GIL, because Triton calls Python while it
// sends, partly with its own locks held.
void SendRecord(
    OwnedBatch* owned, const uint8_t* record, uint64_t length, const std::vector<const uint8_t*>& payloads = {}) {
  const std::lock_guard<std::mutex> lock(owned->mutex);
  static thread_local ResponseRecord response;
  std::string error;
  owned->batch->held_back = deferred.open ? &deferred.responses : nullptr;
  try {
    const uint8_t* const* elsewhere = payloads.empty() ? nullptr : payloads.data();
    if (response.Parse(record, length, owned->Id(), owned->batch->size(), owned->decoupled, &error, elsewhere)) {
      owned->batch->Respond(response);
    }
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  if (!error.empty()) owned->batch->Fail(TRITONSERVER_ERROR_INTERNAL, "the response cannot be sent: " + error);
  owned->batch->held_back = nullptr;
}

// Returns the slab of an instance, made large enough for a record; null with the reason if there is no memory.
uint8_t* MakeRoom(Instance* instance, uint64_t length, std::string* error) {
  if (length > instance->capacity) {
    python_thread.Enter();
    const WithGil gil;
    CallHook(hooks.make_room, NewNumber(instance->token), NewNumber(length));
  }
  if (length <= instance->capacity) return static_cast<uint8_t*>(instance->slab);
  *error = "there is no memory for a batch of " + std::to_string(length) + " bytes";
  return nullptr;
}

void ExecutePart(Instance* instance, std::unique_ptr<Batch> part, BatchSource* scratch) {
  auto owned = std::make_unique<OwnedBatch>(std::move(part), instance->decoupled != 0);
  Batch& batch = *owned->batch;
  BatchSource& source = *scratch;
  static thread_local std::vector<InPlace> in_place;
  std::string error;
  BatchLayout layout;
  uint8_t* record = nullptr;
  do {
    in_place.clear();
    batch.Collect(&source);
    if (batch.finished()) return;
    // With a cache the inputs lie in a question, which the cache may keep. So only without one Triton's memory is
    // handed on as it is.
    for (size_t i = 0; batch.size() == 1 && batch.cache == nullptr && i < source.tensors.size(); ++i) {
      TensorSource& tensor = source.tensors[i];
      if (tensor.piece_count != 1 || tensor.length < instance->in_place_from) continue;
      if (source.pieces[tensor.first_piece].data == nullptr) continue;  // the tensor lies on a device
      tensor.in_place = true;
      in_place.push_back({i, source.pieces[tensor.first_piece].data});
    }
    record = LayoutBatch(source, &layout, &error) ? MakeRoom(instance, layout.written_length, &error) : nullptr;
    if (record == nullptr) {
      batch.Fail(TRITONSERVER_ERROR_INTERNAL, error);
      return;
    }
    WriteBatch(source, layout, owned->Id(), batch.started_ns(), record);
  } while (!batch.CompleteRecord(source, layout, record));
  python_thread.Enter();
  StampSent(record, batch.MarkSent());
  Served served;
  {
    const ExecutingThread in_python;
    deferred.open = instance->decoupled == 0;
    {
      const WithGil gil;
      if (instance->lane != nullptr && in_place.empty()) served = Serve(instance, owned->Id());
      if (served.handle != nullptr) {
        // From here on the batch belongs to the process, and is deleted with its last reference.
        OwnedBatch* handed = owned.release();
        if (served.how == Served::kAnswered) {
          const WithoutGil without;
          SendRecord(handed, served.record, served.length);
        }
        Py_DecRef(served.handle);
      } else if (served.how == Served::kNothing) {
        PyObject* places = PyList_New(0);
        for (const InPlace& tensor : in_place) {
          const Ref place(NewTuple(NewNumber(tensor.tensor), NewNumber(tensor.data)));
          if (places != nullptr && place) PyList_Append(places, place.get());
        }
        const uint64_t taken = CallHook(
            hooks.execute, NewNumber(instance->token), NewNumber(owned.get()), NewNumber(batch.request(0)), places);
        if (taken == 1) owned.release();
      }
    }
  }
  const bool is_failed = owned != nullptr && served.how != Served::kAnswered;
  if (owned != nullptr && !is_failed) {
    SendRecord(owned.get(), served.record, served.length);
    owned.reset();
  }
  deferred.open = false;
  LastResponses responses;
  responses.swap(deferred.responses);
  SendLast(&responses);
  if (is_failed) {
    batch.Fail(TRITONSERVER_ERROR_INTERNAL, "the batch could not be handed to Python; the log of the process says why");
  }
}

void Execute(
    Instance* instance, TRITONBACKEND_ModelInstance* triton_instance, TRITONBACKEND_Request** requests,
    uint32_t count) {
  auto batch = std::make_unique<Batch>(
      0, triton_instance, requests, count, instance->batching != 0, instance->decoupled != 0, &in_flight, nullptr);
  batch->Use(instance->state);
  static thread_local BatchSource source;
  std::vector<std::unique_ptr<Batch>> parts;
  if (instance->cost_limit != 0) {
    Settings settings;
    settings.cost_limit = instance->cost_limit;
    settings.cost_alike = instance->cost_alike;
    settings.cost_packed = instance->cost_packed != 0;
    settings.cost_alone = instance->cost_alone != 0;
    const uint64_t overhead =
        instance->cost_overhead != 0 ? instance->cost_overhead : instance->pace.overhead(instance->cost_limit);
    parts = batch->CutByCost(settings, overhead, &source, [] { return uint64_t{0}; });
    if (batch->finished()) return;
  }
  parts.push_back(std::move(batch));
  for (auto& part : parts) {
    const uint64_t cost = part->cost;
    const uint64_t began_ns = NowNs();
    ExecutePart(instance, std::move(part), &source);
    if (cost != 0 && instance->is_timed != 0) instance->pace.Took(cost, NowNs() - began_ns);
  }
}

// ---- what Python calls -------------------------------------------------------------------------------------------

// (batch, address of a response record, its length, list of the addresses of payloads, 0 for those in the record, or
// None if all are): sends the responses in the record.
PyObject* Respond(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* owned = AddressOf<OwnedBatch>(arguments[0]);
  const auto* record = AddressOf<const uint8_t>(arguments[1]);
  const uint64_t length = PyLong_AsUnsignedLongLong(arguments[2]);
  std::vector<const uint8_t*> payloads;
  if (arguments[3] != &_Py_NoneStruct) {
    const Py_ssize_t count = PyList_Size(arguments[3]);
    for (Py_ssize_t i = 0; i < count; ++i) payloads.push_back(AddressOf<const uint8_t>(PyList_GetItem(arguments[3], i)));
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  {
    const WithoutGil without;
    SendRecord(owned, record, length, payloads);
  }
  return NewNone();
}

// (batch, code, text): answers every request that is still open with an error.
PyObject* Fail(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* owned = AddressOf<OwnedBatch>(arguments[0]);
  const auto code = static_cast<TRITONSERVER_Error_Code>(PyLong_AsLongLong(arguments[1]));
  const char* text = PyBytes_AsString(arguments[2]);
  if (text == nullptr || PyErr_Occurred() != nullptr) return nullptr;
  {
    const WithoutGil without;
    const std::lock_guard<std::mutex> lock(owned->mutex);
    // Answers that come from now on are too late, and are dropped without a message.
    owned->batch->expired = true;
    owned->batch->Fail(code, text);
  }
  return NewNone();
}

bool IsCancelled(OwnedBatch* owned, uint32_t request) {
  // This has the GIL, and a thread that sends a response may wait for it with the mutex held, so this does not wait for
  // the mutex.
  const std::unique_lock<std::mutex> lock(owned->mutex, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  const Batch& batch = *owned->batch;
  if (batch.finished()) return batch.expired;
  if (request != kWholeBatch) return request < batch.size() && batch.IsCancelled(request);
  for (uint32_t i = 0; i < batch.size(); ++i) {
    if (batch.IsOpen(i) && !batch.IsCancelled(i)) return false;
  }
  return true;
}

// (batch, request) -> whether the caller of the request has cancelled it; for the request 0xFFFFFFFF, whether all open
// ones are cancelled. True as well if `Fail` has answered it.
PyObject* IsCancelled(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* owned = AddressOf<OwnedBatch>(arguments[0]);
  const auto request = static_cast<uint32_t>(PyLong_AsUnsignedLongLong(arguments[1]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyBool_FromLong(IsCancelled(owned, request));
}

// (batch) -> whether the batch was deleted; it is not if a request is open
PyObject* Delete(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* owned = AddressOf<OwnedBatch>(arguments[0]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  const bool finished = owned->batch->finished();
  if (finished) delete owned;
  return PyBool_FromLong(finished);
}

// (reason): sets why the hook that runs in this thread refuses.
PyObject* Refuse(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  const char* reason = PyBytes_AsString(arguments[0]);
  if (reason == nullptr) return nullptr;
  refusal = reason;
  return NewNone();
}

PyMethodDef functions[] = {
    {"respond", Respond, METH_FASTCALL, nullptr},          {"fail", Fail, METH_FASTCALL, nullptr},
    {"is_cancelled", IsCancelled, METH_FASTCALL, nullptr}, {"delete", Delete, METH_FASTCALL, nullptr},
    {"refuse", Refuse, METH_FASTCALL, nullptr},            {"new_lane", NewLane, METH_VARARGS, nullptr},
    {"lane_thread", LaneThread, METH_FASTCALL, nullptr},   {"close_lane", CloseLane, METH_FASTCALL, nullptr},
};

}  // namespace

#define PYTRITON_RETURN_IF_ERROR(call)                    \
  do {                                                    \
    TRITONSERVER_Error* pytriton_error = (call);          \
    if (pytriton_error != nullptr) return pytriton_error; \
  } while (false)

// ---- for the process ---------------------------------------------------------------------------------------------

// Looks up Triton's functions, once, in the library with the dlopen handle `triton`. Returns the name of a missing one.
PYTRITON_EXPORT const char* pytriton_inprocess_connect(void* triton) {
  static const char* const missing = FindFunctions(triton);
  return missing;
}

// Waits for the default stream of a device. Returns an error, which is valid until the thread's next call, or null.
PYTRITON_EXPORT const char* pytriton_inprocess_wait_for_device(int device) {
  static thread_local std::string error;
  error = WaitForDefaultStream(device);
  return error.empty() ? nullptr : error.c_str();
}

// Takes the Python functions that serve models, in the order of `Hooks`, and returns the functions with which Python
// answers.
PYTRITON_EXPORT PyObject* pytriton_inprocess_open(PyObject* process) {
  PyObject** places[] = {&hooks.load_model,      &hooks.load_instance, &hooks.unload_model,
                         &hooks.unload_instance, &hooks.make_room,     &hooks.execute};
  Py_ssize_t index = 0;
  for (PyObject** place : places) {
    *place = PyTuple_GetItem(process, index++);
    if (*place == nullptr) return nullptr;
    Py_IncRef(*place);
  }
  PyObject* made = NewFunctions(std::begin(functions), std::end(functions));
  if (made != nullptr) connected = true;
  return made;
}

// To be called when the interpreter is about to end; Python is not called any more afterwards. Threads of Triton that
// still run Python, because a callable does not return, are stopped where they are: an ending interpreter unwinds every
// thread that wants the GIL through the C++ frames below, which aborts the process. This is called with the GIL, so
// those threads do not have it.
PYTRITON_EXPORT void pytriton_inprocess_close() {
  connected = false;
  const std::lock_guard<std::mutex> lock(executing_mutex);
  if (executing.empty()) return;
  struct sigaction action {};
  action.sa_handler = ParkThread;
  sigfillset(&action.sa_mask);
  const int signal = SIGRTMAX - 1;
  if (sigaction(signal, &action, nullptr) != 0) return;
  for (const pthread_t thread : executing) pthread_kill(thread, signal);
}

// ---- for Triton --------------------------------------------------------------------------------------------------

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  // Without Triton's functions this cannot return an error; a model without a state gets no instances.
  if (!connected) return nullptr;
  uint64_t version = 0;
  TRITONBACKEND_ArtifactType artifact;
  const char* folder = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelVersion(model, &version));
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelRepository(model, &artifact, &folder));
  const WithGil gil;
  const uint64_t key = CallHook(hooks.load_model, PyUnicode_DecodeFSDefault(folder), NewNumber(version));
  if (key == 0) return Refused("loading the model");
  return TRITONBACKEND_ModelSetState(model, reinterpret_cast<void*>(key));
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  if (!connected) return nullptr;
  void* key = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &key));
  if (key == nullptr) return nullptr;
  const WithGil gil;
  caches.erase(key);
  CallHook(hooks.unload_model, NewNumber(key));
  return nullptr;
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  if (!connected) return nullptr;
  TRITONBACKEND_Model* model = nullptr;
  void* key = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceModel(instance, &model));
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &key));
  auto made = std::make_unique<Instance>();
  std::string configuration;
  PYTRITON_RETURN_IF_ERROR(ConfigurationOf(model, &configuration));
  made->state->ranks.Read(configuration);
  const WithGil gil;
  made->token = CallHook(hooks.load_instance, NewNumber(key), NewNumber(made.get()));
  if (made->token == 0) return Refused("making an instance of the model");
  if (made->cache_bytes != 0) {
    PYTRITON_RETURN_IF_ERROR(CacheOf(model, key, made->cache_bytes, &made->state->cache));
  }
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceSetState(instance, made.get()));
  made.release();
  return nullptr;
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  if (!connected) return nullptr;
  void* state = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceState(instance, &state));
  const std::unique_ptr<Instance> made(static_cast<Instance*>(state));
  if (made == nullptr) return nullptr;
  // This comes before the GIL is taken, because threads that report statistics do not have it.
  made->state->End();
  const WithGil gil;
  CallHook(hooks.unload_instance, NewNumber(made->token));
  return nullptr;
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t request_count) {
  // If this returns an error, Triton keeps the requests. So errors may be returned only until the batch has taken them
  // over.
  if (!connected) {
    return TRITONSERVER_ErrorNew == nullptr ? nullptr : Refused("executing a batch");
  }
  void* state = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceState(instance, &state));
  if (state == nullptr) return Refused("executing a batch");
  try {
    Execute(static_cast<Instance*>(state), instance, requests, request_count);
  } catch (const std::exception& exception) {
    // The batch was destroyed when the exception left its scope, and its destructor has answered the requests.
    PYTRITON_LOG(ERROR, std::string("executing a batch: ") + exception.what());
  }
  return nullptr;
}

}  // namespace pytriton
