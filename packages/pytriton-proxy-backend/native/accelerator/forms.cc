#include "forms.h"

#include <cstdlib>
#include <cstring>

namespace pytriton {
namespace {

char* CopyOf(const char* data, uint64_t length) {
  char* copy = static_cast<char*>(malloc(length));
  if (copy == nullptr) {
    PyErr_NoMemory();
  } else {
    memcpy(copy, data, length);
  }
  return copy;
}

template <typename T>
T* MakeArray(Py_ssize_t count) {
  T* made = static_cast<T*>(calloc(count == 0 ? 1 : count, sizeof(T)));
  if (made == nullptr) PyErr_NoMemory();
  return made;
}

// Takes (name, shape, dtype, offset, length) over.
bool ReadTensor(PyObject* from, Tensor* tensor) {
  PyObject *name, *shape, *descr;
  unsigned long long offset, length;
  if (!PyArg_ParseTuple(from, "OOOKK", &name, &shape, &descr, &offset, &length)) return false;
  const Py_ssize_t nd = PyTuple_Size(shape);
  if (nd < 0) return false;
  if (nd > kMaxDims) {
    PyErr_Format(PyExc_ValueError, "%zd dimensions, at most %d expected", nd, kMaxDims);
    return false;
  }
  tensor->nd = static_cast<int>(nd);
  for (Py_ssize_t i = 0; i < nd; ++i) {
    tensor->dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    if (tensor->dims[i] < 0) {
      if (PyErr_Occurred() == nullptr) PyErr_Format(PyExc_ValueError, "a dimension below 0");
      return false;
    }
  }
  tensor->offset = offset;
  tensor->length = length;
  Py_IncRef(name);
  Py_IncRef(descr);
  tensor->name = name;
  tensor->descr = descr;
  return true;
}

void FreeTensors(Tensor* tensors, Py_ssize_t count) {
  if (tensors == nullptr) return;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Clear(tensors[i].name);
    Clear(tensors[i].descr);
  }
  free(tensors);
}

void FreeReplyForm(ReplyForm* form) {
  FreeTensors(form->pieces, form->piece_count);
  free(form->sizes);
  free(form->owners);
  free(form->found);
  free(form->metadata);
  free(form);
}

bool ReadReplyForm(PyObject* laid_out, ReplyForm* form) {
  PyObject *metadata, *sizes, *pieces;
  unsigned long long length, payload_bytes;
  int is_list;
  if (!PyArg_ParseTuple(laid_out, "OKKiOO", &metadata, &length, &payload_bytes, &is_list, &sizes, &pieces)) {
    return false;
  }
  form->is_list = is_list != 0;
  form->length = length;
  form->payload_bytes = payload_bytes;
  const Py_ssize_t metadata_length = PyBytes_Size(metadata);
  const Py_ssize_t count = PyTuple_Size(sizes);
  const Py_ssize_t piece_count = PyTuple_Size(pieces);
  if (metadata_length < 0 || count < 0 || piece_count < 0) return false;
  form->metadata_length = metadata_length;
  form->metadata = CopyOf(PyBytes_AsString(metadata), metadata_length);
  form->sizes = MakeArray<Py_ssize_t>(count);
  form->pieces = MakeArray<Tensor>(piece_count);
  form->owners = MakeArray<Py_ssize_t>(piece_count);
  form->found = MakeArray<Array*>(piece_count);
  if (!form->metadata || !form->sizes || !form->pieces || !form->owners || !form->found) return false;
  form->count = count;
  form->piece_count = piece_count;
  for (Py_ssize_t i = 0; i < count; ++i) form->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
  for (Py_ssize_t i = 0; i < piece_count; ++i) {
    PyObject* tensor;
    Py_ssize_t owner;
    if (!PyArg_ParseTuple(PyTuple_GetItem(pieces, i), "nO", &owner, &tensor)) return false;
    if (owner < 0 || owner >= count) {
      PyErr_Format(PyExc_ValueError, "a piece of result %zd of %zd", owner, count);
      return false;
    }
    form->owners[i] = owner;
    if (!ReadTensor(tensor, &form->pieces[i])) return false;
    // The one place where the accelerator is told where to write: what it is told has to be inside of the record.
    const Tensor& piece = form->pieces[i];
    if (piece.offset < form->metadata_length || piece.offset > length || piece.length > length - piece.offset) {
      PyErr_Format(PyExc_ValueError, "a piece outside of its record");
      return false;
    }
  }
  return PyErr_Occurred() == nullptr;
}

bool Fits(const ReplyForm& form, PyObject* result) {
  if (form.is_list) {
    if (result->type != &PyList_Type || PyList_Size(result) != form.count) return false;
  } else if (result->type != &PyDict_Type) {
    return false;
  }
  Py_ssize_t piece = 0;
  for (Py_ssize_t owner = 0; owner < form.count; ++owner) {
    PyObject* outputs = form.is_list ? PyList_GetItem(result, owner) : result;
    if (outputs->type != &PyDict_Type || PyDict_Size(outputs) != form.sizes[owner]) return false;
    for (; piece < form.piece_count && form.owners[piece] == owner; ++piece) {
      const Tensor& tensor = form.pieces[piece];
      PyObject* value = PyDict_GetItemWithError(outputs, tensor.name);
      if (value == nullptr) {
        PyErr_Clear();
        return false;
      }
      if (value->type != numpy.array_type) return false;
      auto* array = reinterpret_cast<Array*>(value);
      if (array->descr != tensor.descr || array->nd != tensor.nd || (array->flags & kContiguous) == 0 ||
          memcmp(array->dims, tensor.dims, tensor.nd * sizeof(Py_ssize_t)) != 0) {
        return false;
      }
      form.found[piece] = array;
    }
  }
  return piece == form.piece_count;
}

bool ReadGaps(PyObject* from, BatchForm* form) {
  const Py_ssize_t count = PyTuple_Size(from);
  if (count < 0) return false;
  form->gaps = MakeArray<Gap>(count);
  if (form->gaps == nullptr) return false;
  uint64_t end = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    unsigned long long offset, length;
    if (!PyArg_ParseTuple(PyTuple_GetItem(from, i), "KK", &offset, &length)) return false;
    offset -= sizeof(RecordHeader);
    if (offset < end || offset > form->metadata_length || length > form->metadata_length - offset) {
      PyErr_Format(PyExc_ValueError, "a gap outside of its metadata");
      return false;
    }
    end = offset + length;
    form->gaps[form->gap_count++] = {offset, length};
  }
  return true;
}

bool ReadBatchForm(const RecordHeader& header, const char* record, PyObject* described, BatchForm* form) {
  PyObject *python, *rows, *inputs, *gaps;
  unsigned long long total_rows, input_bytes;
  if (!PyArg_ParseTuple(described, "OOKKOO", &python, &rows, &total_rows, &input_bytes, &inputs, &gaps)) return false;
  form->metadata_length = header.metadata_length - sizeof(RecordHeader);
  form->metadata = CopyOf(record + sizeof(RecordHeader), form->metadata_length);
  const Py_ssize_t count = PyTuple_Size(inputs);
  if (form->metadata == nullptr || count < 0 || !ReadGaps(gaps, form)) return false;
  form->entry_count = header.entry_count;
  form->tensor_count = header.tensor_count;
  form->entries_offset = header.entries_offset;
  form->tensors_offset = header.tensors_offset;
  form->record_length = header.record_length;
  form->total_rows = total_rows;
  form->input_bytes = input_bytes;
  Py_IncRef(python);
  Py_IncRef(rows);
  form->python = python;
  form->rows = rows;
  form->inputs = MakeArray<Tensor>(count);
  if (form->inputs == nullptr) return false;
  form->input_count = static_cast<int>(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!ReadTensor(PyTuple_GetItem(inputs, i), &form->inputs[i])) return false;
  }
  return true;
}

}  // namespace

BatchForm* MakeBatchForm(const RecordHeader& header, const char* record, PyObject* described) {
  auto* form = MakeArray<BatchForm>(1);
  if (form != nullptr && !ReadBatchForm(header, record, described, form)) {
    FreeBatchForm(form);
    form = nullptr;
  }
  return form;
}

Likeness Compare(const BatchForm& form, const RecordHeader& header, const char* record) {
  if (form.entry_count != header.entry_count || form.record_length != header.record_length ||
      form.metadata_length != header.metadata_length - sizeof(RecordHeader) ||
      form.tensor_count != header.tensor_count || form.entries_offset != header.entries_offset ||
      form.tensors_offset != header.tensors_offset) {
    return Likeness::kOther;
  }
  const char* metadata = record + sizeof(RecordHeader);
  if (memcmp(form.metadata, metadata, form.metadata_length) == 0) return Likeness::kSame;
  if (form.gap_count == 0) return Likeness::kOther;
  uint64_t at = 0;
  for (Py_ssize_t i = 0; i < form.gap_count; ++i) {
    const Gap& gap = form.gaps[i];
    if (memcmp(form.metadata + at, metadata + at, gap.offset - at) != 0) return Likeness::kOther;
    at = gap.offset + gap.length;
  }
  return memcmp(form.metadata + at, metadata + at, form.metadata_length - at) == 0 ? Likeness::kAlike : Likeness::kOther;
}

void FreeBatchForm(BatchForm* form) {
  for (int i = 0; i < form->reply_count; ++i) FreeReplyForm(form->replies[i]);
  FreeTensors(form->inputs, form->input_count);
  Clear(form->python);
  Clear(form->rows);
  free(form->gaps);
  free(form->metadata);
  free(form);
}

ReplyForm* AddReplyForm(BatchForm* form, PyObject* laid_out) {
  auto* made = MakeArray<ReplyForm>(1);
  if (made == nullptr) return nullptr;
  if (!ReadReplyForm(laid_out, made)) {
    FreeReplyForm(made);
    return nullptr;
  }
  if (form->reply_count < kMaxReplyForms) {
    form->replies[form->reply_count++] = made;
  } else {
    ReplyForm*& place = form->replies[form->next_reply++ % kMaxReplyForms];
    FreeReplyForm(place);
    place = made;
  }
  return made;
}

ReplyForm* FindReplyForm(BatchForm* form, PyObject* result) {
  for (int i = 0; i < form->reply_count; ++i) {
    if (Fits(*form->replies[i], result)) return form->replies[i];
  }
  return nullptr;
}

}  // namespace pytriton
