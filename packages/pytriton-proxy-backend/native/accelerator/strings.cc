#include "strings.h"

#include <cstring>

#include "../python/numpy_abi.h"

namespace pytriton {
namespace {

constexpr uint64_t kLengthSize = sizeof(uint32_t);

struct Elements {
  PyObject** data;
  Py_ssize_t count;
};

// Finds the elements of a contiguous array of objects; false with an exception if it is something else.
bool FindElements(PyObject* object, Elements* elements) {
  auto* array = reinterpret_cast<Array*>(object);
  if (object->type != numpy.array_type || KindOf(array) != 'O' ||
      (array->flags & kContiguous) == 0) {
    PyErr_Format(PyExc_ValueError, "expected a contiguous array of objects");
    return false;
  }
  elements->data = reinterpret_cast<PyObject**>(array->data);
  elements->count = 1;
  for (int i = 0; i < array->nd; ++i) elements->count *= array->dims[i];
  return true;
}

// Reads the bytes of a `bytes`, or of a text in UTF-8. Returns false for other objects, and for texts that are too long
// or cannot be encoded.
bool BytesOf(PyObject* element, const char** data, Py_ssize_t* size) {
  if (element == nullptr) return false;
  if (element->type == &PyBytes_Type || PyType_IsSubtype(element->type, &PyBytes_Type)) {
    *data = PyBytes_AsString(element);
    *size = PyBytes_Size(element);
  } else if (element->type == &PyUnicode_Type || PyType_IsSubtype(element->type, &PyUnicode_Type)) {
    *data = PyUnicode_AsUTF8AndSize(element, size);
  } else {
    return false;
  }
  if (*data == nullptr) {
    PyErr_Clear();
    return false;
  }
  return static_cast<uint64_t>(*size) <= UINT32_MAX;
}

// The length of the wire form; negative if an element is no string.
Py_ssize_t WireLength(const Elements& elements) {
  Py_ssize_t total = elements.count * static_cast<Py_ssize_t>(kLengthSize);
  for (Py_ssize_t i = 0; i < elements.count; ++i) {
    const char* data;
    Py_ssize_t size;
    if (!BytesOf(elements.data[i], &data, &size)) return -1;
    total += size;
  }
  return total;
}

PyObject* AreStrings(PyObject*, PyObject* object) {
  Elements elements;
  if (!FindElements(object, &elements)) return nullptr;
  return PyBool_FromLong(WireLength(elements) >= 0);
}

PyObject* EncodeStrings(PyObject*, PyObject* object) {
  Elements elements;
  if (!FindElements(object, &elements)) return nullptr;
  const Py_ssize_t length = WireLength(elements);
  if (length < 0) return NewNone();
  PyObject* payload = PyBytes_FromStringAndSize(nullptr, length);
  if (payload == nullptr) return nullptr;
  char* at = PyBytes_AsString(payload);
  for (Py_ssize_t i = 0; i < elements.count; ++i) {
    const char* data;
    Py_ssize_t size;
    BytesOf(elements.data[i], &data, &size);  // the GIL was held all along, so this gives the same as before
    const uint32_t announced = static_cast<uint32_t>(size);
    memcpy(at, &announced, kLengthSize);
    memcpy(at + kLengthSize, data, size);
    at += kLengthSize + size;
  }
  return payload;
}

// (array, payload)
PyObject* FillStrings(PyObject*, PyObject* args) {
  PyObject *array, *payload;
  Elements elements;
  if (!PyArg_ParseTuple(args, "OO", &array, &payload) || !FindElements(array, &elements)) return nullptr;
  const char* at = PyBytes_AsString(payload);
  if (at == nullptr) return nullptr;
  uint64_t left = PyBytes_Size(payload);
  for (Py_ssize_t i = 0; i < elements.count; ++i) {
    uint32_t size;
    if (left < kLengthSize) return PyBool_FromLong(0);
    memcpy(&size, at, kLengthSize);
    at += kLengthSize;
    left -= kLengthSize;
    if (left < size) return PyBool_FromLong(0);
    PyObject* made = PyBytes_FromStringAndSize(at, size);
    if (made == nullptr) return nullptr;
    at += size;
    left -= size;
    PyObject* old = elements.data[i];
    elements.data[i] = made;
    if (old != nullptr) Py_DecRef(old);
  }
  return PyBool_FromLong(left == 0);
}

}  // namespace

PyMethodDef string_functions[] = {
    {"are_strings", AreStrings, METH_O, nullptr},
    {"encode_strings", EncodeStrings, METH_O, nullptr},
    {"fill_strings", FillStrings, METH_VARARGS, nullptr},
    {},
};

}  // namespace pytriton
