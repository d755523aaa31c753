// The part of CPython's stable ABI, and of numpy's, that is used here, declared by hand: who compiles the wheels has no
// Python.h, and one file is to serve every version. The functions are weak and found in the interpreter: in a
// tritonserver without one the library can be loaded all the same, to say what is missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#define PYTRITON_PYTHON extern "C" __attribute__((weak))

typedef ptrdiff_t Py_ssize_t;
struct PyThreadState;

// As it is where the interpreter has its lock; `object.__basicsize__` of others is larger.
struct PyObject {
  Py_ssize_t refcount;
  PyObject* type;
};

typedef PyObject* (*PyFastFunction)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

struct PyMethodDef {
  const char* name;
  PyFastFunction function;
  int flags;
  const char* doc;
};
constexpr int METH_FASTCALL = 0x0080;

PYTRITON_PYTHON void Py_IncRef(PyObject*);
PYTRITON_PYTHON void Py_DecRef(PyObject*);

PYTRITON_PYTHON PyObject* PyBool_FromLong(long);
PYTRITON_PYTHON char* PyBytes_AsString(PyObject*);
PYTRITON_PYTHON PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
PYTRITON_PYTHON void* PyCapsule_GetPointer(PyObject*, const char*);
PYTRITON_PYTHON PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
PYTRITON_PYTHON PyObject* PyDict_New();
PYTRITON_PYTHON int PyDict_Next(PyObject*, Py_ssize_t*, PyObject**, PyObject**);
PYTRITON_PYTHON int PyDict_SetItem(PyObject*, PyObject*, PyObject*);
PYTRITON_PYTHON int PyDict_SetItemString(PyObject*, const char*, PyObject*);
PYTRITON_PYTHON PyObject* PyErr_Occurred();
PYTRITON_PYTHON void PyErr_Clear();
PYTRITON_PYTHON PyObject* PyErr_NoMemory();
PYTRITON_PYTHON void PyErr_SetString(PyObject*, const char*);
PYTRITON_PYTHON void PyErr_WriteUnraisable(PyObject*);
PYTRITON_PYTHON PyThreadState* PyEval_SaveThread();
PYTRITON_PYTHON void PyEval_RestoreThread(PyThreadState*);
PYTRITON_PYTHON PyObject* PyFloat_FromDouble(double);
PYTRITON_PYTHON int PyGILState_Ensure();
PYTRITON_PYTHON void PyGILState_Release(int);
PYTRITON_PYTHON PyObject* PyList_GetItem(PyObject*, Py_ssize_t);
PYTRITON_PYTHON PyObject* PyList_New(Py_ssize_t);
PYTRITON_PYTHON Py_ssize_t PyList_Size(PyObject*);
PYTRITON_PYTHON int PyList_Append(PyObject*, PyObject*);
PYTRITON_PYTHON long long PyLong_AsLongLong(PyObject*);
PYTRITON_PYTHON unsigned long long PyLong_AsUnsignedLongLong(PyObject*);
PYTRITON_PYTHON PyObject* PyLong_FromLongLong(long long);
PYTRITON_PYTHON PyObject* PyLong_FromUnsignedLongLong(unsigned long long);
PYTRITON_PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PYTRITON_PYTHON PyObject* PyTuple_New(Py_ssize_t);
PYTRITON_PYTHON PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
PYTRITON_PYTHON int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);
PYTRITON_PYTHON Py_ssize_t PyTuple_Size(PyObject*);
PYTRITON_PYTHON const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*);
PYTRITON_PYTHON PyObject* PyUnicode_DecodeFSDefault(const char*);
PYTRITON_PYTHON PyObject* PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char*);

extern "C" __attribute__((weak)) PyObject _Py_NoneStruct;
extern "C" __attribute__((weak)) PyObject* PyExc_ValueError;
extern "C" __attribute__((weak)) PyObject PyTuple_Type;
extern "C" __attribute__((weak)) PyObject PyUnicode_Type;

namespace pytriton {

inline PyObject* NewNone() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

inline PyObject* NewText(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

// Holds the interpreter's lock, in a thread of anybody's.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  int state_;
};

// The interpreter's lock is released as long as it lives.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// The address that a number is; null for None.
template <typename T>
T* AddressOf(PyObject* number) {
  return number == &_Py_NoneStruct ? nullptr : reinterpret_cast<T*>(PyLong_AsUnsignedLongLong(number));
}

// A reference of our own, let go of at the end of the block.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  ~Ref() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&&) = delete;
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

inline PyObject* NewNumber(uint64_t number) { return PyLong_FromUnsignedLongLong(number); }
inline PyObject* NewNumber(const void* address) { return NewNumber(reinterpret_cast<uint64_t>(address)); }

// Makes a tuple of new references, which it takes; null where one of them is.
template <typename... Objects>
PyObject* NewTuple(Objects... objects) {
  PyObject* items[] = {objects...};
  constexpr auto kCount = static_cast<Py_ssize_t>(sizeof...(objects));
  Ref tuple(PyTuple_New(kCount));
  bool complete = static_cast<bool>(tuple);
  for (Py_ssize_t i = 0; i < kCount; ++i) {
    if (items[i] == nullptr) complete = false;
    if (tuple && items[i] != nullptr) {
      PyTuple_SetItem(tuple.get(), i, items[i]);
    } else if (items[i] != nullptr) {
      Py_DecRef(items[i]);
    }
  }
  return complete ? tuple.release() : nullptr;
}

// Calls a function with new references, which it takes.
template <typename... Objects>
PyObject* Call(PyObject* function, Objects... arguments) {
  const Ref references[] = {Ref(arguments)...};
  for (const Ref& reference : references) {
    if (!reference) return nullptr;
  }
  return PyObject_CallFunctionObjArgs(function, arguments..., nullptr);
}

// Makes functions for Python, in a dictionary.
inline PyObject* NewFunctions(PyMethodDef* begin, PyMethodDef* end) {
  Ref made(PyDict_New());
  for (PyMethodDef* function = begin; function != end; ++function) {
    const Ref object(PyCFunction_NewEx(function, nullptr, nullptr));
    if (!made || !object || PyDict_SetItemString(made.get(), function->name, object.get()) != 0) return nullptr;
  }
  return made.release();
}

// ---- numpy, of which 1.26 and 2.x are the same here --------------------------------------------------------------

struct NumpyArray {
  PyObject head;
  char* data;
  int dims_count;
  int64_t* dims;
  int64_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};

constexpr int kArrayContiguous = 0x001;
constexpr int kArrayAligned = 0x100;
constexpr int kArrayWriteable = 0x400;

// Places in the table of functions that numpy gives to extension modules.
constexpr int kNumpyArrayType = 2;
constexpr int kNumpyNewFromDescr = 94;
constexpr int kNumpySetBaseObject = 282;

}  // namespace pytriton
