// The way of a plain batch in process: record -> arrays -> callable -> record, without Python but for the callable.
#pragma once

#include <cstdint>
#include <memory>

#include "../proxy/cost.h"
#include "../proxy/instance_state.h"
#include "instance_fields.h"
#include "python_objects.h"

namespace pytriton {

// One model instance, and what the process says about it. `slab` is where the next batch is written; the process puts
// another one in its place while it has the batch, if anything still refers to what is in it.
struct Instance : InstanceFields {
  std::shared_ptr<InstanceState> state = std::make_shared<InstanceState>();
  CostPace pace;
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
