// The extension module `_accelerator`, with which the workers of `pytriton.proxy_backend` serve plain batches faster.
#include "../python/numpy_abi.h"
#include "lane.h"
#include "strings.h"

namespace pytriton {
namespace {

int Exec(PyObject* module) {
  static bool is_loaded;
  if (is_loaded) {
    PyErr_Format(PyExc_ImportError, "the accelerator is loaded in another interpreter of this process");
    return -1;
  }
  if (!LoadNumpy()) return -1;
  PyObject* lane = MakeLaneType();
  if (lane == nullptr) return -1;
  const int added = PyModule_AddObjectRef(module, "Lane", lane);
  Py_DecRef(lane);
  is_loaded = added == 0;
  return added;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(Exec)}, {}};
PyModuleDef definition{
    {1, nullptr}, nullptr, 0, nullptr, "_accelerator", nullptr, 0, string_functions, slots, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace pytriton

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__accelerator() {
  return PyModuleDef_Init(&pytriton::definition);
}
