// The way of a plain batch in process: record -> arrays -> callable -> record, without Python but for the callable.
#pragma once

#include <cstdint>
#include <memory>

#include "../src/input_ranks.h"
#include "../src/response_cache.h"
#include "python_objects.h"

namespace pytriton {

struct Lane;

// One model instance, and what the process says about it. `slab` is where the next batch is written; the process puts
// another one in its place while it has the batch, if anything still refers to what is in it.
struct Instance {
  void* slab;
  uint64_t capacity;
  uint64_t in_place_from;  // inputs of so many bytes are not copied where they lie in one piece, alone in a batch
  uint64_t token;
  uint32_t batching;
  uint32_t decoupled;
  PyObject* owner;  // what keeps the slab
  Lane* lane;       // null where Python serves every batch
  uint64_t cache_bytes;  // what the answers of all models may take that keep theirs; 0: this one does not
  InputRanks ranks;  // not for Python, like what follows
  std::shared_ptr<ModelCache> cache;
};

// What a lane has done with a batch.
struct Served {
  enum { kNothing, kAnswered, kTaken, kFailed } how = kNothing;  // kTaken: Python has seen to its answers
  const uint8_t* record = nullptr;  // the answers, until the next batch
  uint64_t length = 0;
  PyObject* handle = nullptr;  // a new reference to the object that the batch belongs to, where it was handed to one
};

// Takes the batch in the instance's slab through its lane. With the GIL.
Served Serve(Instance* instance, uint64_t batch);

// What Python calls; see `Lane` in `inprocess/callables/lanes.py`.
PyObject* NewLane(PyObject*, PyObject* arguments);
PyObject* LaneThread(PyObject*, PyObject* const* arguments, Py_ssize_t);
PyObject* CloseLane(PyObject*, PyObject* const* arguments, Py_ssize_t);

}  // namespace pytriton
