// Serves a plain batch in process: record -> arrays -> callable -> record. The only Python code in it is the callable.
#pragma once

#include <cstdint>
#include <memory>

#include "../proxy/batch/cost.h"
#include "../proxy/batch/instance_state.h"
#include "instance_fields.h"
#include "python_objects.h"

namespace pytriton {

// One model instance, with what the process has set about it. The next batch is written to `slab`; if something still
// refers to the batch in it, the process replaces the slab while it has the batch.
struct Instance : InstanceFields {
  std::shared_ptr<InstanceState> state = std::make_shared<InstanceState>();
  CostPace pace;
};

// What a lane has done with a batch.
struct Served {
  enum { kNothing, kAnswered, kTaken, kFailed } how = kNothing;  // kTaken: Python answers the batch
  const uint8_t* record = nullptr;  // the answers, valid until the next batch
  uint64_t length = 0;
  PyObject* handle = nullptr;  // a new reference to the object that the batch was handed to, if any
};

// Serves the batch in the instance's slab through its lane. Needs the GIL.
Served Serve(Instance* instance, uint64_t batch);

// Python calls these; see `Lane` in `inprocess/callables/lanes.py`.
PyObject* NewLane(PyObject*, PyObject* arguments);
PyObject* LaneThread(PyObject*, PyObject* const* arguments, Py_ssize_t);
PyObject* CloseLane(PyObject*, PyObject* const* arguments, Py_ssize_t);

}  // namespace pytriton
