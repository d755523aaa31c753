// The part of CPython's stable ABI that the accelerator uses, declared by hand: who compiles the wheels has no Python.h,
// and one file is to serve every version. Undefined here and found in the interpreter, as for every extension module.
//
// The file is named `.abi3.so`, which no free-threaded interpreter and no other implementation of Python looks for.
// Formats with `#` are not to be used: before 3.13, their functions have other names.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

typedef ptrdiff_t Py_ssize_t;
struct PyTypeObject;
struct PyThreadState;

struct PyObject {
  Py_ssize_t refcount;  // of a meaning that differs from version to version
  PyTypeObject* type;
};

typedef PyObject* (*PyCFunction)(PyObject*, PyObject*);

struct PyMethodDef {
  const char* name;
  PyCFunction function;
  int flags;
  const char* doc;
};
constexpr int METH_VARARGS = 0x0001;
constexpr int METH_NOARGS = 0x0004;
constexpr int METH_O = 0x0008;

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

PyObject* PyModuleDef_Init(PyModuleDef*);
int PyModule_AddObjectRef(PyObject*, const char*, PyObject*);
PyObject* PyType_FromSpec(PyType_Spec*);
PyObject* PyType_GenericAlloc(PyTypeObject*, Py_ssize_t);
PyObject* PyType_GenericNew(PyTypeObject*, PyObject*, PyObject*);
void PyObject_Free(void*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);

PyObject* PyDict_New();
int PyDict_SetItem(PyObject*, PyObject*, PyObject*);
PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
Py_ssize_t PyDict_Size(PyObject*);
PyObject* PyList_New(Py_ssize_t);
int PyList_Append(PyObject*, PyObject*);
PyObject* PyList_GetItem(PyObject*, Py_ssize_t);
Py_ssize_t PyList_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyLong_FromLong(long);
long long PyLong_AsLongLong(PyObject*);
PyObject* PyBytes_FromStringAndSize(const char*, Py_ssize_t);
char* PyBytes_AsString(PyObject*);
Py_ssize_t PyBytes_Size(PyObject*);
char* PyByteArray_AsString(PyObject*);
Py_ssize_t PyByteArray_Size(PyObject*);
const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*);
PyObject* PyBool_FromLong(long);
int PyType_IsSubtype(PyTypeObject*, PyTypeObject*);

PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);  // PyObject_Vectorcall is no function before 3.12
PyObject* PyObject_CallFunction(PyObject*, const char*, ...);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
Py_ssize_t PyObject_Size(PyObject*);
PyObject* PyImport_ImportModule(const char*);
void* PyCapsule_GetPointer(PyObject*, const char*);
PyObject* Py_BuildValue(const char*, ...);
int PyArg_ParseTuple(PyObject*, const char*, ...);

PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState*);

PyObject* PyErr_Occurred();
void PyErr_Clear();
int PyErr_CheckSignals();
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
void PyErr_NormalizeException(PyObject**, PyObject**, PyObject**);
int PyException_SetTraceback(PyObject*, PyObject*);
PyObject* PyErr_Format(PyObject*, const char*, ...);
PyObject* PyErr_NoMemory();
PyObject* PyErr_SetFromErrno(PyObject*);
void PyErr_WriteUnraisable(PyObject*);

extern PyObject _Py_NoneStruct;
extern PyTypeObject PyBytes_Type;
extern PyTypeObject PyDict_Type;
extern PyTypeObject PyList_Type;
extern PyTypeObject PyUnicode_Type;
extern PyObject* PyExc_ImportError;
extern PyObject* PyExc_IndexError;
extern PyObject* PyExc_OSError;
extern PyObject* PyExc_ValueError;

}  // extern "C"

namespace pytriton {

inline PyObject* NewNone() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

// Lets go of what a variable refers to, after it has been emptied: what is freed may run anything.
inline void Clear(PyObject*& variable) {
  PyObject* old = variable;
  variable = nullptr;
  if (old != nullptr) Py_DecRef(old);
}

// Frees an object of one of our types.
inline void FreeObject(PyObject* self) {
  PyTypeObject* type = self->type;
  PyObject_Free(self);
  Py_DecRef(reinterpret_cast<PyObject*>(type));
}

}  // namespace pytriton
