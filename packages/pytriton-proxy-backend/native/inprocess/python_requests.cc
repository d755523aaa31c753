// Requests of Python to Triton: functions that the interpreter calls directly, and the conversion of arrays and
// responses. With a foreign function interface, this part would take longer than the rest of a call.
#include <algorithm>
#include <climits>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "../proxy/wire/protocol.h"
#include "../python/numpy_abi.h"
#include "python_objects.h"
#include "requests.h"

#define PYTRITON_EXPORT extern "C" __attribute__((visibility("default")))

namespace pytriton {
namespace {

using Error = TRITONSERVER_Error;

// What this library knows of Python. Set once, before anything else is called.
struct Environment {
  PyObject* raise_error;  // raises the exception for an error of Triton, given its address
  PyObject* on_event;     // is called with the number of a request and what happened to it
  PyObject* dtypes[16];   // the dtypes of arrays, by Triton's number of the type; null if there is none
} environment;

constexpr int kTypeCount = static_cast<int>(std::size(Environment{}.dtypes));

// Inputs up to this size are copied, so that Python need not be told when Triton has finished with them.
constexpr size_t kCopiedInput = 2048;
// Outputs up to this size are copied into memory of numpy, which is cheaper than an owner for their own memory.
constexpr size_t kCopiedOutput = 4096;

constexpr const char* kRequest = "pytriton.inprocess.request";
constexpr const char* kOutput = "pytriton.inprocess.output";

PyObject* Raise(Error* error) {
  const Ref nothing(Call(environment.raise_error, NewNumber(error)));
  return nullptr;
}

PendingRequest* RequestOf(PyObject* capsule) {
  return static_cast<PendingRequest*>(PyCapsule_GetPointer(capsule, kRequest));
}

void OnEvent(uint64_t number, uint32_t events) {
  const WithGil gil;
  const Ref nothing(Call(environment.on_event, NewNumber(number), NewNumber(events)));
  if (!nothing) PyErr_WriteUnraisable(environment.on_event);
}

// ---- inputs ------------------------------------------------------------------------------------------------------

TRITONSERVER_DataType TypeOf(const PyObject* dtype) {
  // BF16 and BYTES have the dtypes of numbers, which come earlier in the list and so are found first.
  PyObject* const* begin = environment.dtypes;
  PyObject* const* found = std::find(begin, begin + kTypeCount, dtype);
  return found == begin + kTypeCount ? TRITONSERVER_TYPE_INVALID : static_cast<TRITONSERVER_DataType>(found - begin);
}

// Describes an array without copying it; false if it must be converted.
bool DescribeArray(const PyObject* value, InputTensor* input) {
  if (value->type != numpy.array_type) return false;
  const auto* array = reinterpret_cast<const Array*>(value);
  constexpr int kPlain = kContiguous | kAligned;
  if ((array->flags & kPlain) != kPlain) return false;
  input->type = TypeOf(array->descr);
  if (input->type == TRITONSERVER_TYPE_INVALID) return false;
  input->dims = array->dims;
  input->dims_count = static_cast<uint64_t>(array->nd);
  input->data = array->data;
  input->size = kElementSizes[input->type];
  for (int i = 0; i < array->nd; ++i) input->size *= static_cast<size_t>(array->dims[i]);
  input->memory_type = TRITONSERVER_MEMORY_CPU;
  input->device = 0;
  return true;
}

// Reads Python's description of a tensor: type, shape, address, size, kind of memory, device. The dimensions go to
// `dims`.
bool ReadDescription(PyObject* value, std::vector<int64_t>* dims, InputTensor* input) {
  PyObject* shape = PyTuple_GetItem(value, 1);
  if (shape == nullptr) return false;
  const Py_ssize_t count = PyTuple_Size(shape);
  dims->resize(static_cast<size_t>(std::max<Py_ssize_t>(count, 0)));
  for (Py_ssize_t i = 0; i < count; ++i) (*dims)[static_cast<size_t>(i)] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
  input->dims = dims->data();
  input->dims_count = dims->size();
  input->type = static_cast<TRITONSERVER_DataType>(PyLong_AsLongLong(PyTuple_GetItem(value, 0)));
  input->data = AddressOf<void>(PyTuple_GetItem(value, 2));
  input->size = PyLong_AsUnsignedLongLong(PyTuple_GetItem(value, 3));
  input->memory_type = static_cast<TRITONSERVER_MemoryType>(PyLong_AsLongLong(PyTuple_GetItem(value, 4)));
  input->device = PyLong_AsLongLong(PyTuple_GetItem(value, 5));
  return PyErr_Occurred() == nullptr;
}

// ---- responses ---------------------------------------------------------------------------------------------------

void FreeOutput(PyObject* capsule) { free(PyCapsule_GetPointer(capsule, kOutput)); }

// Makes an array over an output, which it takes over.
PyObject* NewArray(OutputTensor* output) {
  PyObject* dtype = output->type > 0 && output->type < kTypeCount ? environment.dtypes[output->type] : nullptr;
  if (dtype == nullptr) {
    return PyErr_Format(PyExc_ValueError, "an output has the unknown type %d", output->type);
  }
  const bool is_bytes = output->type == TRITONSERVER_TYPE_BYTES;
  const auto length = static_cast<int64_t>(output->size);
  const int dims_count = is_bytes ? 1 : static_cast<int>(output->dims.size());
  const int64_t* dims = is_bytes ? &length : output->dims.data();
  const bool is_copied = output->size <= kCopiedOutput;
  Py_IncRef(dtype);  // for the array, which takes a reference
  Ref array(numpy.new_from_descr(
      numpy.array_type, dtype, dims_count, dims, nullptr, is_copied ? nullptr : output->data,
      is_copied ? 0 : kContiguous | kAligned | kWriteable, nullptr));
  if (!array) return nullptr;
  if (is_copied) {
    if (length != 0) std::memcpy(reinterpret_cast<Array*>(array.get())->data, output->data, output->size);
    return array.release();
  }
  PyObject* owner = PyCapsule_New(output->memory.get(), kOutput, FreeOutput);
  if (owner == nullptr) return nullptr;
  output->memory.release();
  // This takes the owner even if it fails.
  if (numpy.set_base_object(array.get(), owner) != 0) return nullptr;
  return array.release();
}

PyObject* NewShape(const std::vector<int64_t>& dims) {
  Ref shape(PyTuple_New(static_cast<Py_ssize_t>(dims.size())));
  for (size_t i = 0; shape && i < dims.size(); ++i) {
    PyObject* dim = PyLong_FromLongLong(dims[i]);
    if (dim == nullptr) return nullptr;
    PyTuple_SetItem(shape.get(), static_cast<Py_ssize_t>(i), dim);
  }
  return shape.release();
}

// Makes (name, number of the type, shape, array); for elements on a device, their address in place of the array.
PyObject* NewOutput(OutputTensor* output) {
  const bool on_device = output->data != nullptr && output->memory == nullptr;
  return NewTuple(
      NewText(output->name), PyLong_FromLongLong(output->type), NewShape(output->dims),
      on_device ? NewNumber(output->data) : NewArray(output));
}

PyObject* NewOutputs(std::vector<OutputTensor>* outputs) {
  Ref all(PyTuple_New(static_cast<Py_ssize_t>(outputs->size())));
  for (size_t i = 0; all && i < outputs->size(); ++i) {
    PyObject* output = NewOutput(&(*outputs)[i]);
    if (output == nullptr) return nullptr;
    PyTuple_SetItem(all.get(), static_cast<Py_ssize_t>(i), output);
  }
  return all.release();
}

PyObject* NewValue(const ReceivedParameter& parameter) {
  switch (parameter.type) {
    case TRITONSERVER_PARAMETER_STRING: return NewText(parameter.text);
    case TRITONSERVER_PARAMETER_BOOL: return PyBool_FromLong(parameter.number != 0);
    case TRITONSERVER_PARAMETER_DOUBLE: return PyFloat_FromDouble(parameter.real);
    default: return PyLong_FromLongLong(parameter.number);
  }
}

PyObject* NewParameters(const std::vector<ReceivedParameter>& parameters) {
  if (parameters.empty()) return NewNone();
  Ref all(PyDict_New());
  for (const ReceivedParameter& parameter : parameters) {
    const Ref key(NewText(parameter.key));
    const Ref value(NewValue(parameter));
    if (!all || !key || !value || PyDict_SetItem(all.get(), key.get(), value.get()) != 0) return nullptr;
  }
  return all.release();
}

PyObject* NewResponse(ReceivedResponse* response) {
  const int flags = (response->final ? kFinal : 0) | (response->cancelled ? kCancelled : 0) |
                    (response->completed ? kComplete : 0);
  const bool failed = response->failed;
  return NewTuple(
      PyLong_FromLongLong(flags), NewText(response->model), PyLong_FromLongLong(response->version),
      NewParameters(response->parameters), failed ? PyLong_FromLongLong(response->error_code) : NewNone(),
      failed ? NewText(response->error) : NewNone(), NewOutputs(&response->outputs),
      response->label.empty() ? NewNone() : NewText(response->label));
}

// ---- what Python calls -------------------------------------------------------------------------------------------

void DropRequest(PyObject* capsule) { RequestOf(capsule)->Unref(); }

// (number) -> the request, which ends with its last reference
PyObject* New(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* request = new PendingRequest(PyLong_AsUnsignedLongLong(arguments[0]));
  PyObject* capsule = PyCapsule_New(request, kRequest, DropRequest);
  if (capsule == nullptr) request->Unref();
  return capsule;
}

// (request, server, model, version, inputs, keep) -> address of Triton's request, None if an input must be converted.
// `inputs` are arrays, and tuples for `ReadDescription`; those that are not copied are added to `keep`.
PyObject* Create(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  PendingRequest* request = RequestOf(arguments[0]);
  auto* server = AddressOf<TRITONSERVER_Server>(arguments[1]);
  const char* model = PyBytes_AsString(arguments[2]);
  const int64_t version = PyLong_AsLongLong(arguments[3]);
  if (request == nullptr || PyErr_Occurred() != nullptr) return nullptr;
  std::vector<InputTensor> inputs;
  std::vector<std::vector<int64_t>> shapes;
  size_t copied = 0;
  // Other threads may change the dictionary while the GIL is released, so its objects are held.
  std::vector<Ref> held;
  const Py_ssize_t count = PyDict_Size(arguments[4]);
  if (count < 0) return nullptr;
  inputs.reserve(static_cast<size_t>(count));
  held.reserve(2 * static_cast<size_t>(count));
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(arguments[4], &place, &name, &value) != 0;) {
    Py_IncRef(name);
    held.emplace_back(name);
    Py_IncRef(value);
    held.emplace_back(value);
    InputTensor input;
    Py_ssize_t length = 0;
    if (name->type != &PyUnicode_Type) return NewNone();
    input.name = PyUnicode_AsUTF8AndSize(name, &length);
    if (input.name == nullptr) {
      PyErr_Clear();  // whoever converts the inputs raises a better error
      return NewNone();
    }
    if (std::strlen(input.name) != static_cast<size_t>(length)) return NewNone();
    if (value->type == &PyTuple_Type) {
      shapes.emplace_back();
      if (!ReadDescription(value, &shapes.back(), &input)) return nullptr;
    } else if (!DescribeArray(value, &input)) {
      return NewNone();
    }
    if (input.memory_type == TRITONSERVER_MEMORY_CPU && input.size <= kCopiedInput) {
      copied += (input.size + kOutputOffset - 1) / kOutputOffset * kOutputOffset;
    } else if (PyList_Append(arguments[5], value) != 0) {
      return nullptr;
    }
    inputs.push_back(input);
  }
  uint8_t* copies = copied == 0 ? nullptr : request->Reserve(copied);
  if (copied != 0 && copies == nullptr) return PyErr_NoMemory();
  for (InputTensor& input : inputs) {
    if (input.memory_type != TRITONSERVER_MEMORY_CPU || input.size > kCopiedInput) continue;
    if (input.size != 0) std::memcpy(copies, input.data, input.size);
    input.data = copies;
    copies += (input.size + kOutputOffset - 1) / kOutputOffset * kOutputOffset;
  }
  Error* error = nullptr;
  {
    const WithoutGil without;
    error = request->Create(server, model, version, inputs);
  }
  if (error != nullptr) return Raise(error);
  return NewNumber(request->request());
}

// (request, server, trace, allocator, events)
PyObject* Submit(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  PendingRequest* request = RequestOf(arguments[0]);
  auto* server = AddressOf<TRITONSERVER_Server>(arguments[1]);
  auto* trace = AddressOf<TRITONSERVER_InferenceTrace>(arguments[2]);
  auto* allocator = AddressOf<TRITONSERVER_ResponseAllocator>(arguments[3]);
  const auto events = static_cast<uint32_t>(PyLong_AsUnsignedLongLong(arguments[4]));
  if (request == nullptr || PyErr_Occurred() != nullptr) return nullptr;
  Error* error = nullptr;
  {
    const WithoutGil without;
    error = request->Submit(server, trace, allocator, events);
  }
  return error == nullptr ? NewNone() : Raise(error);
}

// (request) -> whether Triton has not got it, and never will
PyObject* Withdraw(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  PendingRequest* request = RequestOf(arguments[0]);
  if (request == nullptr) return nullptr;
  bool withdrawn = false;
  {
    const WithoutGil without;
    withdrawn = request->Withdraw();
  }
  return PyBool_FromLong(withdrawn);
}

// (request, timeout in ns) -> a response; None if none came in time, False if none will come
PyObject* Take(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  PendingRequest* request = RequestOf(arguments[0]);
  const int64_t timeout_ns = PyLong_AsLongLong(arguments[1]);
  if (request == nullptr || PyErr_Occurred() != nullptr) return nullptr;
  std::unique_ptr<ReceivedResponse> response;
  PendingRequest::Taken taken;
  if (request->HasArrived() || timeout_ns <= 0) {
    taken = request->Take(0, &response);
  } else {
    const WithoutGil without;
    taken = request->Take(timeout_ns, &response);
  }
  switch (taken) {
    case PendingRequest::Taken::kNothingYet: return NewNone();
    case PendingRequest::Taken::kNothingMore: return PyBool_FromLong(0);
    default: return NewResponse(response.get());
  }
}

// (request) -> whether it has ended
PyObject* Cancel(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  PendingRequest* request = RequestOf(arguments[0]);
  if (request == nullptr) return nullptr;
  bool ended = false;
  {
    const WithoutGil without;
    ended = request->Cancel();
  }
  return PyBool_FromLong(ended);
}

PyMethodDef functions[] = {
    {"new_request", New, METH_FASTCALL, nullptr},      {"create_request", Create, METH_FASTCALL, nullptr},
    {"submit_request", Submit, METH_FASTCALL, nullptr}, {"withdraw_request", Withdraw, METH_FASTCALL, nullptr},
    {"take_response", Take, METH_FASTCALL, nullptr},    {"cancel_request", Cancel, METH_FASTCALL, nullptr},
};

}  // namespace

// Returns a dictionary of functions for Python. `dtypes` are those of arrays by Triton's numbers.
PYTRITON_EXPORT PyObject* pytriton_inprocess_open_requests(
    PyObject* dtypes, PyObject* raise_error, PyObject* on_event) {
  if (!LoadNumpy()) return nullptr;
  PyObject *number = nullptr, *dtype = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(dtypes, &place, &number, &dtype) != 0;) {
    const auto type = PyLong_AsLongLong(number);
    if (type <= 0 || type >= kTypeCount) continue;
    Py_IncRef(dtype);
    environment.dtypes[type] = dtype;
  }
  Py_IncRef(raise_error);
  environment.raise_error = raise_error;
  Py_IncRef(on_event);
  environment.on_event = on_event;
  PyObject* made = NewFunctions(std::begin(functions), std::end(functions));
  if (made == nullptr) return nullptr;
  SetEventCallback(OnEvent);
  return made;
}

// To be called when the interpreter is about to end; Python is not called any more afterwards.
PYTRITON_EXPORT void pytriton_inprocess_close_requests() { SetEventCallback(nullptr); }

}  // namespace pytriton
