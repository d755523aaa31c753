// The part of CPython's stable ABI that is used here, declared by hand: the machines that compile the wheels have no
// Python.h, and one file is for every version. The functions are undefined in our libraries and found in the
// interpreter, as in every extension module.
//
// PYTRITON_PYTHON is `__attribute__((weak))` for a library that is also loaded into processes without an interpreter.
// Formats with `#` must not be used: before 3.13, their functions have other names.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef PYTRITON_PYTHON
#define PYTRITON_PYTHON
#endif

extern "C" {

typedef ptrdiff_t Py_ssize_t;
struct PyTypeObject;
struct PyThreadState;

// The layout in an interpreter with a GIL; in others `object.__basicsize__` is larger.
struct PyObject {
  Py_ssize_t refcount;  // its meaning differs between versions
  PyTypeObject* type;
};

typedef PyObject* (*PyCFunction)(PyObject* self, PyObject* argument);
typedef PyObject* (*PyCFunctionFast)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

// The flags say which member is set.
union PyMethodFunction {
  constexpr PyMethodFunction(PyCFunction function = nullptr) : plain(function) {}
  constexpr PyMethodFunction(PyCFunctionFast function) : fast(function) {}
  PyCFunction plain;
  PyCFunctionFast fast;
};

struct PyMethodDef {
  const char* name;
  PyMethodFunction function;
  int flags;
  const char* doc;
};
constexpr int METH_VARARGS = 0x0001;
constexpr int METH_NOARGS = 0x0004;
constexpr int METH_O = 0x0008;
constexpr int METH_FASTCALL = 0x0080;

struct PyModuleDef_Slot {
  int slot;
  void* value;
};
constexpr int Py_mod_exec = 2;

struct PyModuleDef {
  PyObject head;
  PyObject* (*init)();
  Py_ssize_t index;
  PyObject* copy;
  const char* name;
  const char* doc;
  Py_ssize_t size;
  PyMethodDef* methods;
  PyModuleDef_Slot* slots;
  void* traverse;
  void* clear;
  void* free;
};

struct PyType_Slot {
  int slot;
  void* function;
};
constexpr int Py_sq_item = 44;
constexpr int Py_tp_call = 50;
constexpr int Py_tp_dealloc = 52;
constexpr int Py_tp_doc = 56;
constexpr int Py_tp_init = 60;
constexpr int Py_tp_methods = 64;
constexpr int Py_tp_new = 65;

struct PyType_Spec {
  const char* name;
  int basicsize;
  int itemsize;
  unsigned int flags;
  PyType_Slot* slots;
};
constexpr unsigned int Py_TPFLAGS_DISALLOW_INSTANTIATION = 1u << 7;
constexpr unsigned int Py_TPFLAGS_DEFAULT = 1u << 18;

PYTRITON_PYTHON PyObject* PyModuleDef_Init(PyModuleDef*);
PYTRITON_PYTHON int PyModule_AddObjectRef(PyObject*, const char*, PyObject*);
PYTRITON_PYTHON PyObject* PyType_FromSpec(PyType_Spec*);
PYTRITON_PYTHON PyObject* PyType_GenericAlloc(PyTypeObject*, Py_ssize_t);
PYTRITON_PYTHON PyObject* PyType_GenericNew(PyTypeObject*, PyObject*, PyObject*);
PYTRITON_PYTHON int PyType_IsSubtype(PyTypeObject*, PyTypeObject*);
PYTRITON_PYTHON void PyObject_Free(void*);
PYTRITON_PYTHON void Py_IncRef(PyObject*);
PYTRITON_PYTHON void Py_DecRef(PyObject*);

PYTRITON_PYTHON PyObject* PyDict_New();
PYTRITON_PYTHON int PyDict_Next(PyObject*, Py_ssize_t*, PyObject**, PyObject**);
PYTRITON_PYTHON int PyDict_SetItem(PyObject*, PyObject*, PyObject*);
PYTRITON_PYTHON int PyDict_SetItemString(PyObject*, const char*, PyObject*);
PYTRITON_PYTHON PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
PYTRITON_PYTHON Py_ssize_t PyDict_Size(PyObject*);
PYTRITON_PYTHON PyObject* PyList_New(Py_ssize_t);
PYTRITON_PYTHON int PyList_Append(PyObject*, PyObject*);
PYTRITON_PYTHON PyObject* PyList_GetItem(PyObject*, Py_ssize_t);
PYTRITON_PYTHON Py_ssize_t PyList_Size(PyObject*);
PYTRITON_PYTHON PyObject* PyTuple_New(Py_ssize_t);
PYTRITON_PYTHON PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
PYTRITON_PYTHON int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);
PYTRITON_PYTHON Py_ssize_t PyTuple_Size(PyObject*);
PYTRITON_PYTHON PyObject* PyBool_FromLong(long);
PYTRITON_PYTHON PyObject* PyFloat_FromDouble(double);
PYTRITON_PYTHON PyObject* PyLong_FromLong(long);
PYTRITON_PYTHON PyObject* PyLong_FromLongLong(long long);
PYTRITON_PYTHON PyObject* PyLong_FromUnsignedLongLong(unsigned long long);
PYTRITON_PYTHON long long PyLong_AsLongLong(PyObject*);
PYTRITON_PYTHON unsigned long long PyLong_AsUnsignedLongLong(PyObject*);
PYTRITON_PYTHON PyObject* PyBytes_FromStringAndSize(const char*, Py_ssize_t);
PYTRITON_PYTHON char* PyBytes_AsString(PyObject*);
PYTRITON_PYTHON Py_ssize_t PyBytes_Size(PyObject*);
PYTRITON_PYTHON char* PyByteArray_AsString(PyObject*);
PYTRITON_PYTHON Py_ssize_t PyByteArray_Size(PyObject*);
PYTRITON_PYTHON const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*);
PYTRITON_PYTHON PyObject* PyUnicode_DecodeFSDefault(const char*);
PYTRITON_PYTHON PyObject* PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char*);
PYTRITON_PYTHON PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
PYTRITON_PYTHON void* PyCapsule_GetPointer(PyObject*, const char*);
PYTRITON_PYTHON PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);

// PyObject_Vectorcall is not a function before 3.12.
PYTRITON_PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PYTRITON_PYTHON PyObject* PyObject_CallFunction(PyObject*, const char*, ...);
PYTRITON_PYTHON PyObject* PyObject_GetAttrString(PyObject*, const char*);
PYTRITON_PYTHON Py_ssize_t PyObject_Size(PyObject*);
PYTRITON_PYTHON PyObject* PyImport_ImportModule(const char*);
PYTRITON_PYTHON PyObject* Py_BuildValue(const char*, ...);
PYTRITON_PYTHON int PyArg_ParseTuple(PyObject*, const char*, ...);

PYTRITON_PYTHON PyThreadState* PyEval_SaveThread();
PYTRITON_PYTHON void PyEval_RestoreThread(PyThreadState*);
PYTRITON_PYTHON int PyGILState_Ensure();
PYTRITON_PYTHON void PyGILState_Release(int);

PYTRITON_PYTHON PyObject* PyErr_Occurred();
PYTRITON_PYTHON void PyErr_Clear();
PYTRITON_PYTHON int PyErr_CheckSignals();
PYTRITON_PYTHON void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
PYTRITON_PYTHON void PyErr_Restore(PyObject*, PyObject*, PyObject*);
PYTRITON_PYTHON void PyErr_NormalizeException(PyObject**, PyObject**, PyObject**);
PYTRITON_PYTHON int PyException_SetTraceback(PyObject*, PyObject*);
PYTRITON_PYTHON PyObject* PyErr_Format(PyObject*, const char*, ...);
PYTRITON_PYTHON PyObject* PyErr_NoMemory();
PYTRITON_PYTHON PyObject* PyErr_SetFromErrno(PyObject*);
PYTRITON_PYTHON void PyErr_WriteUnraisable(PyObject*);

extern PYTRITON_PYTHON PyObject _Py_NoneStruct;
extern PYTRITON_PYTHON PyTypeObject PyBytes_Type;
extern PYTRITON_PYTHON PyTypeObject PyDict_Type;
extern PYTRITON_PYTHON PyTypeObject PyList_Type;
extern PYTRITON_PYTHON PyTypeObject PyTuple_Type;
extern PYTRITON_PYTHON PyTypeObject PyUnicode_Type;
extern PYTRITON_PYTHON PyObject* PyExc_ImportError;
extern PYTRITON_PYTHON PyObject* PyExc_IndexError;
extern PYTRITON_PYTHON PyObject* PyExc_OSError;
extern PYTRITON_PYTHON PyObject* PyExc_ValueError;

}  // extern "C"

namespace pytriton {

inline PyObject* NewNone() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

// Empties a variable, then drops its reference: freeing an object may run any code, which must not find it.
inline void Clear(PyObject*& variable) {
  PyObject* old = variable;
  variable = nullptr;
  if (old != nullptr) Py_DecRef(old);
}

template <typename F>
void* Slot(F* function) {
  return reinterpret_cast<void*>(function);
}

// Makes a type; null with an exception.
inline PyTypeObject* MakeType(const char* name, size_t size, unsigned int flags, PyType_Slot* slots) {
  PyType_Spec spec{name, static_cast<int>(size), 0, flags, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// Frees an object of one of our types.
inline void FreeObject(PyObject* self) {
  PyTypeObject* type = self->type;
  PyObject_Free(self);
  Py_DecRef(reinterpret_cast<PyObject*>(type));
}

}  // namespace pytriton
