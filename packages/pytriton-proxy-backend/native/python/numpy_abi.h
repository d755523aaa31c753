// The part of numpy's ABI that is used here: the layout of an array, and functions by their numbers in numpy's table.
// Both are the same in numpy 1.26 and 2.x.
#pragma once

#include "python_abi.h"

namespace pytriton {

struct Array {
  PyObject head;
  char* data;
  int nd;
  Py_ssize_t* dims;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};

// The letter of `dtype.kind`, which lies behind the type of the scalars.
inline char KindOf(const Array* array) {
  return reinterpret_cast<const char*>(array->descr)[sizeof(PyObject) + sizeof(PyTypeObject*)];
}

constexpr int kContiguous = 0x001;
constexpr int kAligned = 0x100;
constexpr int kWriteable = 0x400;

struct Numpy {
  PyTypeObject* array_type;
  // (type, descr, which is stolen, nd, dims, strides, data, flags, object)
  PyObject* (*new_from_descr)(
      PyTypeObject*, PyObject*, int, const Py_ssize_t*, const Py_ssize_t*, void*, int, PyObject*);
  // (array, base, which is stolen)
  int (*set_base_object)(PyObject*, PyObject*);
};

extern Numpy numpy;

// Finds numpy's table; false with an exception if its ABI is unknown.
bool LoadNumpy();

}  // namespace pytriton
