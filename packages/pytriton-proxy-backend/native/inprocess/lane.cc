// Like the lane of the accelerator, this compares batches and results with forms that Python has checked the first
// time; Python handles everything else. The memory belongs to the process: a batch lies in the instance's slab, and its
// answers lie in memory of the lane until Triton has them.
#include "lane.h"

#include <pthread.h>

#include <cstring>
#include <memory>
#include <new>

#include "../accelerator/plain.h"

namespace pytriton {
namespace {

constexpr const char* kLane = "pytriton.inprocess.lane";

// The base object of the arrays of a batch, which keeps their memory alive. Whoever drops it holds the GIL.
struct Block {
  PyObject head;
  PyObject* owner;
  Block** place;  // the lane's pointer to it, until the batch is over
};

// The requests of a batch that belongs to the object `handle`, once that exists.
struct OwnedRequests : Requests {
  PyObject* make_handle;
  PyObject* handle;  // null until somebody has asked for it
  uint64_t batch;    // 0 once the batch is answered
};

PyTypeObject* block_type;
PyTypeObject* requests_type;

void FreeBlock(PyObject* self) {
  auto* block = reinterpret_cast<Block*>(self);
  if (block->place != nullptr) *block->place = nullptr;
  Clear(block->owner);
  FreeObject(self);
}

void FreeOwnedRequests(PyObject* self) {
  auto* requests = reinterpret_cast<OwnedRequests*>(self);
  Clear(requests->make_handle);
  Clear(requests->handle);
  FreeRequests(self);
}

// Hands the batch to a Python object; false with an exception.
bool HandOver(OwnedRequests* requests) {
  if (requests->handle == nullptr && requests->batch != 0) {
    requests->handle = Call(requests->make_handle, NewNumber(requests->batch));
    return requests->handle != nullptr;
  }
  return true;
}

PyObject* CallRequests(PyObject* self, PyObject*, PyObject*) {
  auto* requests = reinterpret_cast<OwnedRequests*>(self);
  if (!HandOver(requests)) return nullptr;
  return WithParts(*requests, [requests](auto... parts) {
    return PyObject_CallFunction(
        requests->make, "OOOiOOKKK", requests->handle == nullptr ? &_Py_NoneStruct : requests->handle, parts...);
  });
}

bool MakeTypes() {
  if (requests_type != nullptr) return true;
  PyType_Slot block_slots[] = {{Py_tp_dealloc, Slot(FreeBlock)}, {}};
  PyType_Slot requests_slots[] = {{Py_tp_dealloc, Slot(FreeOwnedRequests)}, {Py_tp_call, Slot(CallRequests)}, {}};
  constexpr unsigned int kInner = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  if (block_type == nullptr) block_type = MakeType("pytriton.inprocess.Block", sizeof(Block), kInner, block_slots);
  requests_type = MakeType("pytriton.inprocess.Requests", sizeof(OwnedRequests), kInner, requests_slots);
  return block_type != nullptr && requests_type != nullptr;
}

}  // namespace

struct Lane {
  Instance* instance = nullptr;
  bool takes_columns = false;
  PyObject *run = nullptr, *callable = nullptr, *counters = nullptr;
  PyObject *describe = nullptr, *lay_out = nullptr, *make_handle = nullptr, *make_requests = nullptr;
  PyObject *resume = nullptr, *renew = nullptr;
  Counts* counts = nullptr;
  Forms forms{};
  Block* current = nullptr;  // the block of the current batch, as long as anything refers to it
  uint64_t thread = 0;       // the thread that serves a batch, as in `threading.get_ident`
  std::unique_ptr<uint8_t[]> reply;
  uint64_t reply_capacity = 0;
};

namespace {

struct Method {
  const char* name;
  PyObject* Lane::*member;
};
constexpr Method kMethods[] = {
    {"describe", &Lane::describe},           {"lay_out", &Lane::lay_out}, {"make_handle", &Lane::make_handle},
    {"make_requests", &Lane::make_requests}, {"resume", &Lane::resume},   {"renew", &Lane::renew},
};

void Empty(Lane* lane) {
  if (lane->instance != nullptr && lane->instance->lane == lane) lane->instance->lane = nullptr;
  lane->instance = nullptr;
  FreeForms(&lane->forms);
  for (const Method& method : kMethods) Clear(lane->*method.member);
  Clear(lane->run);
  Clear(lane->callable);
}

Lane* LaneOf(PyObject* capsule) { return static_cast<Lane*>(PyCapsule_GetPointer(capsule, kLane)); }

void DropLane(PyObject* capsule) {
  Lane* lane = LaneOf(capsule);
  Empty(lane);
  Clear(lane->counters);
  delete lane;
}

Block* MakeBlock(Lane* lane) {
  auto* block = reinterpret_cast<Block*>(PyType_GenericAlloc(block_type, 0));
  if (block == nullptr) return nullptr;
  block->owner = lane->instance->owner;
  Py_IncRef(block->owner);
  block->place = &lane->current;
  lane->current = block;
  return block;
}

// Makes the object by which callables under `@batch` get a batch; null with an exception.
OwnedRequests* MakeRequests(
    Lane* lane, const BatchForm& form, const RecordHeader& header, char* record, Likeness likeness, uint64_t batch) {
  Block* block = MakeBlock(lane);
  if (block == nullptr) return nullptr;
  auto* requests = reinterpret_cast<OwnedRequests*>(MakeRequests(
      requests_type, lane->make_requests, &block->head, form, header, record, record, likeness));
  if (requests == nullptr) return nullptr;
  requests->make_handle = lane->make_handle;
  Py_IncRef(requests->make_handle);
  requests->batch = batch;
  return requests;
}

// Calls the callable in the context of the runner, which `run` enters.
PyObject* CallCallable(Lane* lane, const BatchForm& form, OwnedRequests* requests) {
  if (lane->takes_columns) {
    return PyObject_CallFunctionObjArgs(
        lane->run, lane->callable, requests->columns, form.rows, &requests->head, nullptr);
  }
  PyObject* made = CallRequests(&requests->head, nullptr, nullptr);
  if (made == nullptr) return nullptr;
  PyObject* result = PyObject_CallFunctionObjArgs(lane->run, lane->callable, made, nullptr);
  Py_DecRef(made);
  return result;
}

bool HasRoom(Lane* lane, uint64_t length) {
  if (length <= lane->reply_capacity) return true;
  lane->reply.reset(new (std::nothrow) uint8_t[length]);
  lane->reply_capacity = lane->reply == nullptr ? 0 : length;
  return lane->reply != nullptr;
}

// Gives the instance another slab, because something still refers to the current one.
void Renew(Lane* lane) {
  if (lane->current == nullptr) return;
  lane->current->place = nullptr;
  lane->current = nullptr;
  const Ref done(Call(lane->renew));
  if (!done) PyErr_WriteUnraisable(lane->renew);
}

// Hands a call that was made to Python, which answers the batch. Takes `result`.
Served Resume(Lane* lane, OwnedRequests* requests, uint64_t called_ns, PyObject* result) {
  PyObject* error = TakeError();
  if (error != nullptr) Clear(result);
  Served served;
  served.how = Served::kFailed;
  if (HandOver(requests)) {
    served.how = Served::kTaken;
    served.handle = requests->handle;
    Py_IncRef(served.handle);
    PyObject* called = WithParts(*requests, [&](auto... parts) {
      return Py_BuildValue(
          "[OOOiOOKKKKNN]", requests->handle, parts..., static_cast<unsigned long long>(called_ns),
          result == nullptr ? NewNone() : result, error == nullptr ? NewNone() : error);
    });
    result = error = nullptr;
    Py_DecRef(&requests->head);
    requests = nullptr;
    const Ref done(Call(lane->resume, called));
  }
  if (PyErr_Occurred() != nullptr) PyErr_WriteUnraisable(lane->resume);
  Clear(result);
  Clear(error);
  if (requests != nullptr) Py_DecRef(&requests->head);
  return served;
}

Served ServeIn(Lane* lane, char* record, uint64_t batch) {
  Served served;
  RecordHeader header;
  memcpy(&header, record, sizeof(header));
  if (header.metadata_length > kComparedBytes) return served;
  Likeness likeness;
  BatchForm* form = FindForm(&lane->forms, lane->describe, header, record, &likeness);
  OwnedRequests* requests = form == nullptr ? nullptr : MakeRequests(lane, *form, header, record, likeness, batch);
  if (requests == nullptr) {
    if (PyErr_Occurred() != nullptr) PyErr_WriteUnraisable(lane->describe);
    return served;
  }
  const uint64_t called_ns = Now();
  PyObject* result = CallCallable(lane, *form, requests);
  const uint64_t spent_ns = Now() - called_ns;
  const ReplyForm* reply = result == nullptr ? nullptr : FormOf(form, lane->lay_out, requests->raw, likeness, result);
  if (reply == nullptr || !HasRoom(lane, reply->length)) return Resume(lane, requests, called_ns, result);
  auto* answer = reinterpret_cast<char*>(lane->reply.get());
  WriteMetadata(*reply, header.batch, answer);
  CopyPayloads(*reply, answer);
  Count(lane->counts, *form, header, *reply, called_ns, spent_ns);
  served.how = Served::kAnswered;
  served.record = lane->reply.get();
  served.length = reply->length;
  served.handle = requests->handle;
  if (served.handle != nullptr) Py_IncRef(served.handle);
  requests->batch = 0;
  Clear(result);
  Py_DecRef(&requests->head);
  return served;
}

}  // namespace

Served Serve(Instance* instance, uint64_t batch) {
  Lane* lane = instance->lane;
  lane->thread = pthread_self();
  const Served served = ServeIn(lane, static_cast<char*>(instance->slab), batch);
  lane->thread = 0;
  Renew(lane);
  return served;
}

// ---- what Python calls -------------------------------------------------------------------------------------------

// (address of the instance, the context's `run`, callable, whether it takes columns, (address of the counters, how
// many), their array, host) -> a lane
PyObject* NewLane(PyObject*, PyObject* arguments) {
  PyObject *run, *callable, *counters, *host;
  unsigned long long instance, address;
  Py_ssize_t count;
  int takes_columns;
  if (!PyArg_ParseTuple(
          arguments, "KOOi(Kn)OO", &instance, &run, &callable, &takes_columns, &address, &count, &counters, &host)) {
    return nullptr;
  }
  Counts* counts = CountsAt(address, count);
  if (counts == nullptr || !MakeTypes() || (numpy.array_type == nullptr && !LoadNumpy())) return nullptr;
  auto* lane = new (std::nothrow) Lane();
  if (lane == nullptr) return PyErr_NoMemory();
  Ref capsule(PyCapsule_New(lane, kLane, DropLane));
  if (!capsule) {
    delete lane;
    return nullptr;
  }
  for (const Method& method : kMethods) {
    lane->*method.member = PyObject_GetAttrString(host, method.name);
    if (lane->*method.member == nullptr) return nullptr;
  }
  Py_IncRef(run);
  Py_IncRef(callable);
  Py_IncRef(counters);
  lane->run = run;
  lane->callable = callable;
  lane->counters = counters;
  lane->takes_columns = takes_columns != 0;
  lane->counts = counts;
  lane->instance = reinterpret_cast<Instance*>(instance);
  lane->instance->lane = lane;
  return capsule.release();
}

// (lane) -> the thread that serves a batch; 0 if none does
PyObject* LaneThread(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  const Lane* lane = LaneOf(arguments[0]);
  return lane == nullptr ? nullptr : NewNumber(lane->thread);
}

// (lane): drops all references. A lane does not take part in cyclic garbage collection: whoever made it closes it.
PyObject* CloseLane(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  Lane* lane = LaneOf(arguments[0]);
  if (lane == nullptr) return nullptr;
  Empty(lane);
  return NewNone();
}

}  // namespace pytriton
