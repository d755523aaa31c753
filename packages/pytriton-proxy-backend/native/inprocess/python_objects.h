// Python objects as C++ makes and holds them, and the GIL.
#pragma once

#include <string>

#include "../python/python_abi.h"

namespace pytriton {

inline PyObject* NewText(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

// Holds the GIL in any thread.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  int state_;
};

// Releases the GIL as long as it lives.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// The address that a number stands for; null for None.
template <typename T>
T* AddressOf(PyObject* number) {
  return number == &_Py_NoneStruct ? nullptr : reinterpret_cast<T*>(PyLong_AsUnsignedLongLong(number));
}

// An owned reference, which is dropped at the end of the block.
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

// Makes a tuple of new references, which it takes over; null if one of them is null.
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

// Calls a function with new references, which it takes over.
template <typename... Objects>
PyObject* Call(PyObject* function, Objects... arguments) {
  const Ref references[] = {Ref(arguments)...};
  for (const Ref& reference : references) {
    if (!reference) return nullptr;
  }
  return PyObject_CallFunctionObjArgs(function, arguments..., nullptr);
}

// Makes a dictionary of functions for Python.
inline PyObject* NewFunctions(PyMethodDef* begin, PyMethodDef* end) {
  Ref made(PyDict_New());
  for (PyMethodDef* function = begin; function != end; ++function) {
    const Ref object(PyCFunction_NewEx(function, nullptr, nullptr));
    if (!made || !object || PyDict_SetItemString(made.get(), function->name, object.get()) != 0) return nullptr;
  }
  return made.release();
}

}  // namespace pytriton
