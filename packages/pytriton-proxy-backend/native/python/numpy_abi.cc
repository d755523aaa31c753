#include "numpy_abi.h"

namespace pytriton {

Numpy numpy;

bool LoadNumpy() {
  PyObject* module = PyImport_ImportModule("numpy._core._multiarray_umath");
  if (module == nullptr) {
    PyErr_Clear();
    module = PyImport_ImportModule("numpy.core._multiarray_umath");  // the name before numpy 2.0
  }
  if (module == nullptr) return false;
  PyObject* capsule = PyObject_GetAttrString(module, "_ARRAY_API");
  Py_DecRef(module);
  if (capsule == nullptr) return false;
  auto** table = static_cast<void**>(PyCapsule_GetPointer(capsule, nullptr));
  Py_DecRef(capsule);  // numpy keeps it, and its table lies in the library
  if (table == nullptr) return false;
  const unsigned version = reinterpret_cast<unsigned (*)()>(table[0])();
  if (version >> 24 != 1 && version >> 24 != 2) {
    PyErr_Format(PyExc_ImportError, "numpy has the ABI %x, which is not known here", version);
    return false;
  }
  numpy.array_type = static_cast<PyTypeObject*>(table[2]);
  numpy.new_from_descr = reinterpret_cast<decltype(numpy.new_from_descr)>(table[94]);
  numpy.set_base_object = reinterpret_cast<decltype(numpy.set_base_object)>(table[282]);
  return true;
}

}  // namespace pytriton
