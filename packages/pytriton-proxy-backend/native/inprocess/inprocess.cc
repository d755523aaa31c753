// A backend for Triton inside a Python process: its entry points call functions that the process has set, and what the
// process answers goes straight into Triton's response buffers. Batches and answers have the form of the records of
// the proxy's protocol, in memory of the process. Knows nothing of Python but three functions for its thread states.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../src/batch.h"
#include "../src/record.h"
#include "../src/triton_util.h"

#define PYTRITON_EXPORT extern "C" __attribute__((visibility("default")))

namespace pytriton {

TritonTable triton_table;

namespace {

// One model instance, and what the process says about it. `slab` is where the next batch is written; the process puts
// another one in its place while it has the batch, if anything still refers to what is in it.
struct Instance {
  void* slab;
  uint64_t capacity;
  uint64_t in_place_from;  // inputs of so many bytes are not copied where they lie in one piece, alone in a batch
  uint64_t token;
  uint32_t batching;
  uint32_t decoupled;
};

struct InPlace {
  uint64_t tensor;  // its place in the record
  const void* data;
};

// Called in threads of Triton, without the GIL; each takes it by itself, and none lets an exception out.
struct Hooks {
  // Give 0 where the process refuses, with the reason in `pytriton_inprocess_refuse`.
  uint64_t (*load_model)(const char* folder, uint64_t version);
  void (*unload_model)(uint64_t model);
  uint64_t (*load_instance)(uint64_t model, Instance* instance);
  void (*unload_instance)(uint64_t token);
  // Makes the slab of an instance so large.
  void (*make_room)(uint64_t token, uint64_t length);
  // Gives 1 where it has taken the batch over: from then on it belongs to the process.
  uint32_t (*execute)(
      uint64_t token, void* batch, void* request, const InPlace* in_place, uint32_t in_place_count);
};

struct ThreadStates {
  int (*ensure)();
  void (*release)(int);
  void* (*save)();
};

constexpr int kGilLocked = 0;
constexpr int kGilUnlocked = 1;

Hooks hooks;
ThreadStates python;
// False before `connect`, and again when the interpreter is about to end: nothing of Python may be called then.
std::atomic<bool> connected{false};
thread_local std::string refusal;

// Gives a thread of Triton a Python thread state for its whole life. Otherwise each call would make a new one, and what
// belongs to a thread (`threading.local`, the current event loop) would be gone after each batch.
struct PythonThread {
  bool made = false;

  void Enter() {
    if (made) return;
    python.ensure();
    python.save();
    made = true;
  }

  ~PythonThread() {
    if (!made || !connected) return;
    python.ensure();
    python.release(kGilLocked);
    python.release(kGilUnlocked);
  }
};

thread_local PythonThread python_thread;

// Threads of Triton that are in Python with a batch.
std::mutex busy_mutex;
std::set<pthread_t> busy;

class Busy {
 public:
  Busy() {
    const std::lock_guard<std::mutex> lock(busy_mutex);
    busy.insert(pthread_self());
  }
  ~Busy() {
    const std::lock_guard<std::mutex> lock(busy_mutex);
    busy.erase(pthread_self());
  }
};

// The last responses of the batch that this thread has in Python. They are sent when it is back: otherwise whoever waits
// for them would be woken into a race for the GIL, and wait for what is left to do there.
struct Outbox {
  LastResponses responses;
  bool open = false;
};

thread_local Outbox outbox;

void Freeze(int) {
  for (;;) pause();
}

std::atomic<uint64_t> in_flight{0};  // batches of all models, which nobody asks for here

// A batch in the hands of the process, which may ask about it from any thread.
struct Handle {
  Handle(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count, bool batching,
         bool decoupled)
      : decoupled(decoupled), batch(Id(), instance, requests, count, batching, decoupled, &in_flight, nullptr) {}

  uint64_t Id() const { return reinterpret_cast<uint64_t>(this); }

  bool decoupled;
  std::mutex mutex;
  Batch batch;
};

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

void Execute(
    Instance* instance, TRITONBACKEND_ModelInstance* triton_instance, TRITONBACKEND_Request** requests,
    uint32_t count) {
  auto handle = std::make_unique<Handle>(
      triton_instance, requests, count, instance->batching != 0, instance->decoupled != 0);
  Batch& batch = handle->batch;
  static thread_local BatchSource source;
  static thread_local std::vector<InPlace> in_place;
  std::string error;
  BatchLayout layout;
  in_place.clear();
  bool collected = batch.Collect(&source, &error);
  if (collected && count == 1) {
    for (size_t i = 0; i < source.tensors.size(); ++i) {
      TensorSource& tensor = source.tensors[i];
      if (tensor.piece_count != 1 || tensor.length < instance->in_place_from) continue;
      tensor.in_place = true;
      in_place.push_back({i, source.pieces[tensor.first_piece].data});
    }
  }
  collected = collected && LayoutBatch(source, &layout, &error);
  python_thread.Enter();
  if (collected && layout.written_length > instance->capacity) {
    hooks.make_room(instance->token, layout.written_length);
    if (layout.written_length > instance->capacity) {
      error = "there is no memory for a batch of " + std::to_string(layout.written_length) + " bytes";
      collected = false;
    }
  }
  if (!collected) {
    batch.Fail(TRITONSERVER_ERROR_INTERNAL, error);
    return;
  }
  auto* record = static_cast<uint8_t*>(instance->slab);
  WriteBatch(source, layout, handle->Id(), batch.started_ns(), record);
  StampSent(record, batch.MarkSent());
  uint32_t taken = 0;
  {
    const Busy in_python;
    outbox.open = instance->decoupled == 0;
    taken = hooks.execute(
        instance->token, handle.get(), requests[0], in_place.data(), static_cast<uint32_t>(in_place.size()));
    outbox.open = false;
  }
  LastResponses responses;
  responses.swap(outbox.responses);
  SendLast(&responses);
  if (taken == 1) {
    handle.release();
    return;
  }
  batch.Fail(TRITONSERVER_ERROR_INTERNAL, "the batch could not be handed to Python; the log of the process says why");
}

}  // namespace
}  // namespace pytriton

using pytriton::connected;
using pytriton::Handle;
using pytriton::hooks;
using pytriton::Instance;
using pytriton::MakeError;

#define PYTRITON_RETURN_IF_ERROR(call)                    \
  do {                                                    \
    TRITONSERVER_Error* pytriton_error = (call);          \
    if (pytriton_error != nullptr) return pytriton_error; \
  } while (false)

// ---- for the process ---------------------------------------------------------------------------------------------

// Finds Triton's functions in the library behind `triton`, a handle of dlopen. Returns the name of one that is missing.
PYTRITON_EXPORT const char* pytriton_inprocess_connect(
    void* triton, const pytriton::Hooks* process, const pytriton::ThreadStates* thread_states) {
#define PYTRITON_FIND(name)                        \
  pytriton::triton_table.TRITON##name##_ =         \
      reinterpret_cast<decltype(pytriton::triton_table.TRITON##name##_)>(dlsym(triton, "TRITON" #name));
#define PYTRITON_FIND_OR_FAIL(name) \
  PYTRITON_FIND(name)               \
  if (pytriton::triton_table.TRITON##name##_ == nullptr) return "TRITON" #name;
  PYTRITON_TRITON_FUNCTIONS(PYTRITON_FIND_OR_FAIL)
  PYTRITON_OPTIONAL_TRITON_FUNCTIONS(PYTRITON_FIND)
  hooks = *process;
  pytriton::python = *thread_states;
  connected = true;
  return nullptr;
}

// The interpreter is about to end: from now on nothing of Python is called. Threads of Triton that are in Python all the
// same, with a callable that does not return, stop where they are: an interpreter that ends unwinds every thread that
// wants its lock, through the frames of C++ below, and that aborts the process. Called with the GIL, so they do not
// have it.
PYTRITON_EXPORT void pytriton_inprocess_close() {
  connected = false;
  const std::lock_guard<std::mutex> lock(pytriton::busy_mutex);
  if (pytriton::busy.empty()) return;
  struct sigaction action {};
  action.sa_handler = pytriton::Freeze;
  sigfillset(&action.sa_mask);
  const int signal = SIGRTMAX - 1;
  if (sigaction(signal, &action, nullptr) != 0) return;
  for (const pthread_t thread : pytriton::busy) pthread_kill(thread, signal);
}

// Notes why a hook refuses; for the hook that runs in this thread.
PYTRITON_EXPORT void pytriton_inprocess_refuse(const char* reason) { pytriton::refusal = reason; }

// Sends the answers in a response record. `payloads` is null, or has the address of each tensor's payload that does not
// lie in the record, else 0. Returns 1 when every request of the batch has its last answer.
PYTRITON_EXPORT int pytriton_inprocess_respond(
    Handle* handle, const uint8_t* record, uint64_t length, const uint8_t* const* payloads) {
  const std::lock_guard<std::mutex> lock(handle->mutex);
  static thread_local pytriton::ResponseRecord response;
  std::string error;
  handle->batch.held_back = pytriton::outbox.open ? &pytriton::outbox.responses : nullptr;
  try {
    if (response.Parse(record, length, handle->Id(), handle->batch.size(), handle->decoupled, &error, payloads)) {
      handle->batch.Respond(response);
    }
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  if (!error.empty()) handle->batch.Fail(TRITONSERVER_ERROR_INTERNAL, "the response cannot be sent: " + error);
  handle->batch.held_back = nullptr;
  return handle->batch.finished() ? 1 : 0;
}

// Answers every request that is still open with an error.
PYTRITON_EXPORT void pytriton_inprocess_fail(Handle* handle, int code, const char* text) {
  const std::lock_guard<std::mutex> lock(handle->mutex);
  // What the callable may still answer comes too late, and nobody needs to be told.
  handle->batch.expired = true;
  handle->batch.Fail(static_cast<TRITONSERVER_Error_Code>(code), text);
}

// Whether the caller of a request has given it up; of the request 0xFFFFFFFF, those of all that are open. So has nobody
// left to answer to who has got an error from `fail`.
PYTRITON_EXPORT int pytriton_inprocess_is_cancelled(Handle* handle, uint32_t request) {
  // Called with the GIL, which a response that is being sent may wait for.
  const std::unique_lock<std::mutex> lock(handle->mutex, std::try_to_lock);
  if (!lock.owns_lock()) return 0;
  if (handle->batch.finished()) return handle->batch.expired ? 1 : 0;
  if (request != pytriton::kWholeBatch) return request < handle->batch.size() && handle->batch.IsCancelled(request);
  for (uint32_t i = 0; i < handle->batch.size(); ++i) {
    if (handle->batch.IsOpen(i) && !handle->batch.IsCancelled(i)) return 0;
  }
  return 1;
}

// Deletes a batch. Returns 0, and does nothing, where a request of it is open.
PYTRITON_EXPORT int pytriton_inprocess_delete(Handle* handle) {
  if (!handle->batch.finished()) return 0;
  delete handle;
  return 1;
}

// ---- for Triton --------------------------------------------------------------------------------------------------

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  // Without a table there is no way to say what is wrong; a model without a state has no instances.
  if (!connected) return nullptr;
  uint64_t version = 0;
  TRITONBACKEND_ArtifactType artifact;
  const char* folder = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelVersion(model, &version));
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelRepository(model, &artifact, &folder));
  const uint64_t key = hooks.load_model(folder, version);
  if (key == 0) return pytriton::Refused("loading the model");
  return TRITONBACKEND_ModelSetState(model, reinterpret_cast<void*>(key));
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  if (!connected) return nullptr;
  void* key = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &key));
  if (key != nullptr) hooks.unload_model(reinterpret_cast<uint64_t>(key));
  return nullptr;
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  if (!connected) return nullptr;
  TRITONBACKEND_Model* model = nullptr;
  void* key = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceModel(instance, &model));
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &key));
  auto made = std::make_unique<Instance>();
  made->token = hooks.load_instance(reinterpret_cast<uint64_t>(key), made.get());
  if (made->token == 0) return pytriton::Refused("making an instance of the model");
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceSetState(instance, made.get()));
  made.release();
  return nullptr;
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  if (!connected) return nullptr;
  void* state = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceState(instance, &state));
  const std::unique_ptr<Instance> made(static_cast<Instance*>(state));
  if (made != nullptr) hooks.unload_instance(made->token);
  return nullptr;
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t request_count) {
  // An error returned here leaves the requests with Triton, so it may come only before the batch takes them over.
  if (!connected) {
    return pytriton::triton_table.TRITONSERVER_ErrorNew_ == nullptr ? nullptr : pytriton::Refused("executing a batch");
  }
  void* state = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceState(instance, &state));
  if (state == nullptr) return pytriton::Refused("executing a batch");
  try {
    pytriton::Execute(static_cast<Instance*>(state), instance, requests, request_count);
  } catch (const std::exception& exception) {
    // The batch has answered its requests when it was destroyed on the way here.
    PYTRITON_LOG(ERROR, std::string("executing a batch: ") + exception.what());
  }
  return nullptr;
}
