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

// Takes name, dimensions and dtype of a tensor from Python objects.
bool ReadTensor(PyObject* name, PyObject* shape, PyObject* descr, Tensor* tensor) {
  const Py_ssize_t nd = PyTuple_Size(shape);
  if (nd < 0) return false;
  if (nd > kAcceleratedDims) {
    PyErr_Format(PyExc_ValueError, "%zd dimensions, at most %d expected", nd, kAcceleratedDims);
    return false;
  }
  tensor->nd = static_cast<int>(nd);
  for (Py_ssize_t i = 0; i < nd; ++i) tensor->dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
  if (PyErr_Occurred() != nullptr) return false;
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

// The bytes of a tensor's elements; 0 if it has none, or too many to be counted.
uint64_t BytesOf(const Tensor& tensor, const Py_ssize_t* dims) {
  uint64_t bytes = tensor.item_size;
  for (int i = 0; i < tensor.nd; ++i) {
    if (dims[i] <= 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(dims[i]), &bytes)) return 0;
  }
  return bytes;
}

uint64_t AlignUp(uint64_t value) { return (value + kAlignment - 1) & ~uint64_t{kAlignment - 1}; }

template <typename T>
T ReadAt(const char* record, uint64_t offset) {
  T value;
  memcpy(&value, record + offset, sizeof(T));
  return value;
}

template <typename T>
void WriteAt(char* record, uint64_t offset, T value) {
  memcpy(record + offset, &value, sizeof(T));
}

// ---- results -------------------------------------------------------------------------------------------------------

void FreeReplyForm(ReplyForm* form) {
  FreeTensors(form->pieces, form->piece_count);
  FreeTensors(form->tensors, form->tensor_count);
  free(form->sizes);
  free(form->owners);
  free(form->found);
  free(form->rows);
  free(form->metadata);
  free(form);
}

// Whether everything that is rewritten for other sizes lies within the metadata.
bool HasPlaces(const ReplyForm& form) {
  const auto header = ReadAt<RecordHeader>(form.metadata, 0);
  if (header.entries_offset + form.entry_count * sizeof(ResponseEntry) > form.metadata_length ||
      header.tensors_offset + form.tensor_count * sizeof(TensorEntry) > form.metadata_length) {
    return false;
  }
  for (Py_ssize_t i = 0; i < form.tensor_count; ++i) {
    const auto entry = ReadAt<TensorEntry>(form.metadata, header.tensors_offset + i * sizeof(TensorEntry));
    if (entry.dims_offset + form.tensors[i].nd * sizeof(int64_t) > form.metadata_length) return false;
  }
  return true;
}

bool ReadReplyForm(const BatchForm& batch, PyObject* laid_out, ReplyForm* form) {
  PyObject *metadata, *sizes, *pieces, *shapes;
  unsigned long long length, payload_bytes, limit;
  int is_list;
  if (!PyArg_ParseTuple(
          laid_out, "OKKiOOOK", &metadata, &length, &payload_bytes, &is_list, &sizes, &pieces, &shapes, &limit)) {
    return false;
  }
  form->is_list = is_list != 0;
  form->is_sized = shapes != &_Py_NoneStruct;
  form->is_joined = batch.batching;
  form->length = length;
  form->payload_bytes = payload_bytes;
  form->limit = limit;
  form->entry_count = batch.entry_count;
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
  form->rows = MakeArray<uint32_t>(batch.entry_count);
  if (!form->metadata || !form->sizes || !form->pieces || !form->owners || !form->found || !form->rows) return false;
  memcpy(form->rows, batch.row_counts, batch.entry_count * sizeof(uint32_t));
  form->count = count;
  form->piece_count = piece_count;
  for (Py_ssize_t i = 0; i < count; ++i) form->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
  for (Py_ssize_t i = 0; i < piece_count; ++i) {
    PyObject *name, *shape, *descr;
    unsigned long long offset, bytes;
    Py_ssize_t owner;
    if (!PyArg_ParseTuple(PyTuple_GetItem(pieces, i), "nOOOKK", &owner, &name, &shape, &descr, &offset, &bytes)) {
      return false;
    }
    if (owner < 0 || owner >= count) {
      PyErr_Format(PyExc_ValueError, "a piece of result %zd of %zd", owner, count);
      return false;
    }
    form->owners[i] = owner;
    Tensor& piece = form->pieces[i];
    if (!ReadTensor(name, shape, descr, &piece)) return false;
    piece.offset = offset;
    piece.length = bytes;
    // Only here Python says where the accelerator is to write, so this checks that it lies within the record.
    if (piece.offset < form->metadata_length || piece.offset > length || piece.length > length - piece.offset) {
      PyErr_Format(PyExc_ValueError, "a piece outside of its record");
      return false;
    }
  }
  if (!form->is_sized) return PyErr_Occurred() == nullptr;
  const Py_ssize_t tensor_count = PyTuple_Size(shapes);
  if (tensor_count < 0) return false;
  form->tensors = MakeArray<Tensor>(tensor_count);
  if (form->tensors == nullptr) return false;
  form->tensor_count = tensor_count;
  bool fits = tensor_count * count == piece_count && count == (form->is_list ? batch.entry_count : 1);
  for (Py_ssize_t i = 0; fits && i < tensor_count; ++i) {
    const Tensor& piece = form->pieces[i];
    if (!ReadTensor(piece.name, PyTuple_GetItem(shapes, i), piece.descr, &form->tensors[i])) return false;
    Tensor one = piece;
    one.item_size = 1;
    const uint64_t elements = BytesOf(one, piece.dims);
    fits = form->tensors[i].nd == piece.nd && elements != 0 && (piece.nd > 0 || !form->is_joined);
    form->tensors[i].item_size = fits ? piece.length / elements : 0;
  }
  if (!fits || !HasPlaces(*form)) {
    PyErr_Format(PyExc_ValueError, "shapes that do not fit the pieces");
    return false;
  }
  return PyErr_Occurred() == nullptr;
}

// The rows of one dictionary of outputs in a record that joins several.
Py_ssize_t RowsOf(const ReplyForm& form, const BatchForm& batch, Py_ssize_t owner) {
  return form.is_list ? form.found[owner * form.tensor_count]->dims[0] : static_cast<Py_ssize_t>(batch.total_rows);
}

// Whether the arrays that were found are as Python has checked them, except for their sizes.
bool FitsSized(const ReplyForm& form, const BatchForm& batch) {
  uint64_t payload_bytes = 0;
  for (Py_ssize_t i = 0; i < form.piece_count; ++i) {
    const Tensor& tensor = form.tensors[i % form.tensor_count];
    const Py_ssize_t* dims = form.found[i]->dims;
    const Py_ssize_t* first = form.found[i % form.tensor_count]->dims;
    for (int axis = 0; axis < tensor.nd; ++axis) {
      const bool is_rows = axis == 0 && form.is_joined;
      if (tensor.dims[axis] != -1 && dims[axis] != tensor.dims[axis]) return false;
      if (dims[axis] != (is_rows ? RowsOf(form, batch, form.owners[i]) : first[axis])) return false;
      if (is_rows && dims[axis] > UINT32_MAX) return false;
    }
    const uint64_t bytes = BytesOf(tensor, dims);
    if (bytes == 0) return false;
    payload_bytes += bytes;
  }
  return form.limit == 0 || payload_bytes < form.limit;
}

// Lays the record out for the arrays that were found, in the way of `wire.record`.
void Resize(ReplyForm* form, const BatchForm& batch) {
  char* metadata = form->metadata;
  const auto header = ReadAt<RecordHeader>(metadata, 0);
  uint64_t offset = form->metadata_length;
  form->payload_bytes = 0;
  for (Py_ssize_t at = 0; at < form->tensor_count; ++at) {
    const Tensor& tensor = form->tensors[at];
    const uint64_t begin = offset;
    int64_t rows = 0;
    for (Py_ssize_t i = at; i < form->piece_count; i += form->tensor_count) {
      Tensor& piece = form->pieces[i];
      const Py_ssize_t* dims = form->found[i]->dims;
      memcpy(piece.dims, dims, tensor.nd * sizeof(Py_ssize_t));
      piece.offset = offset;
      piece.length = BytesOf(tensor, dims);
      offset += piece.length;
      rows += tensor.nd > 0 ? dims[0] : 0;
    }
    const uint64_t entry = header.tensors_offset + at * sizeof(TensorEntry);
    const uint64_t length = offset - begin;
    WriteAt(metadata, entry + offsetof(TensorEntry, payload_offset), begin);
    WriteAt(metadata, entry + offsetof(TensorEntry, payload_length), length);
    const auto dims_offset = ReadAt<uint32_t>(metadata, entry + offsetof(TensorEntry, dims_offset));
    for (int axis = 0; axis < tensor.nd; ++axis) {
      const int64_t dim = axis == 0 ? rows : form->found[at]->dims[axis];
      WriteAt(metadata, dims_offset + axis * sizeof(int64_t), dim);
    }
    form->payload_bytes += length;
    offset = AlignUp(offset);
  }
  form->length = offset;
  WriteAt(metadata, offsetof(RecordHeader, record_length), offset);
  memcpy(form->rows, batch.row_counts, form->entry_count * sizeof(uint32_t));
  for (uint32_t i = 0; form->is_joined && i < form->entry_count; ++i) {
    const uint32_t rows = form->is_list ? static_cast<uint32_t>(RowsOf(*form, batch, i)) : batch.row_counts[i];
    const uint64_t entry = header.entries_offset + i * sizeof(ResponseEntry);
    WriteAt(metadata, entry + offsetof(ResponseEntry, rows), rows);
  }
}

bool Fits(ReplyForm* form, const BatchForm& batch, PyObject* result) {
  if (form->is_list) {
    if (result->type != &PyList_Type || PyList_Size(result) != form->count) return false;
  } else if (result->type != &PyDict_Type) {
    return false;
  }
  bool is_same = memcmp(form->rows, batch.row_counts, form->entry_count * sizeof(uint32_t)) == 0;
  if (!is_same && !form->is_sized) return false;
  Py_ssize_t place = 0;
  for (Py_ssize_t owner = 0; owner < form->count; ++owner) {
    PyObject* outputs = form->is_list ? PyList_GetItem(result, owner) : result;
    if (outputs->type != &PyDict_Type || PyDict_Size(outputs) != form->sizes[owner]) return false;
    for (; place < form->piece_count && form->owners[place] == owner; ++place) {
      const Tensor& piece = form->pieces[place];
      PyObject* value = PyDict_GetItemWithError(outputs, piece.name);
      if (value == nullptr) {
        PyErr_Clear();
        return false;
      }
      if (value->type != numpy.array_type) return false;
      auto* array = reinterpret_cast<Array*>(value);
      if (array->descr != piece.descr || array->nd != piece.nd || (array->flags & kContiguous) == 0) return false;
      if (memcmp(array->dims, piece.dims, piece.nd * sizeof(Py_ssize_t)) != 0) {
        if (!form->is_sized) return false;
        is_same = false;
      }
      form->found[place] = array;
    }
  }
  if (place != form->piece_count) return false;
  if (is_same) return true;
  if (!FitsSized(*form, batch)) return false;
  Resize(form, batch);
  return true;
}

// ---- batches -------------------------------------------------------------------------------------------------------

// Notes that a piece of the metadata is compared; false with an exception if there is no such piece.
bool Look(BatchForm* form, uint64_t offset, uint64_t length) {
  if (offset > form->metadata_length || length > form->metadata_length - offset) {
    PyErr_Format(PyExc_ValueError, "a piece outside of its metadata");
    return false;
  }
  if (form->end < offset + length) form->end = offset + length;
  return true;
}

// As in Python's check, an empty text lies inside wherever it points.
bool LiesInside(StringRef ref, uint64_t metadata_length) {
  return ref.length == 0 || uint64_t{ref.offset} + ref.length <= metadata_length;
}

bool ReadFixed(PyObject* fixed, PyObject* refs, BatchForm* form) {
  const Py_ssize_t fixed_count = PyTuple_Size(fixed);
  const Py_ssize_t text_count = PyTuple_Size(refs);
  if (fixed_count < 0 || text_count < 0) return false;
  form->fixed = MakeArray<Piece>(fixed_count);
  form->texts = MakeArray<Text>(text_count);
  if (form->fixed == nullptr || form->texts == nullptr) return false;
  for (; form->fixed_count < fixed_count; ++form->fixed_count) {
    unsigned long long offset, length;
    if (!PyArg_ParseTuple(PyTuple_GetItem(fixed, form->fixed_count), "KK", &offset, &length)) return false;
    if (!Look(form, offset, length)) return false;
    form->fixed[form->fixed_count] = {offset, length};
  }
  for (; form->text_count < text_count; ++form->text_count) {
    const uint64_t at = PyLong_AsUnsignedLongLong(PyTuple_GetItem(refs, form->text_count));
    if (PyErr_Occurred() != nullptr || !Look(form, at, sizeof(StringRef))) return false;
    const auto ref = ReadAt<StringRef>(form->metadata, at);
    if (!LiesInside(ref, form->metadata_length)) {
      PyErr_Format(PyExc_ValueError, "a text outside of its metadata");
      return false;
    }
    form->texts[form->text_count] = {at, ref.length, form->metadata + (ref.length == 0 ? 0 : ref.offset)};
  }
  return true;
}

bool ReadBatchForm(const RecordHeader& header, const char* record, PyObject* described, BatchForm* form) {
  PyObject *python, *inputs, *fixed, *refs;
  unsigned long long limit;
  int batching;
  if (!PyArg_ParseTuple(described, "OOOOiK", &python, &inputs, &fixed, &refs, &batching, &limit)) return false;
  form->metadata_length = header.metadata_length;
  form->metadata = CopyOf(record, form->metadata_length);
  form->entry_count = header.entry_count;
  form->tensor_count = header.tensor_count;
  form->entries_offset = header.entries_offset;
  form->tensors_offset = header.tensors_offset;
  form->batching = batching != 0;
  form->limit = limit;
  Py_IncRef(python);
  form->python = python;
  const Py_ssize_t count = PyTuple_Size(inputs);
  if (form->metadata == nullptr || count < 0 || !ReadFixed(fixed, refs, form)) return false;
  form->row_counts = MakeArray<uint32_t>(form->entry_count);
  form->inputs = MakeArray<Tensor>(count);
  if (form->row_counts == nullptr || form->inputs == nullptr) return false;
  if (!Look(form, form->entries_offset, form->entry_count * sizeof(RequestEntry)) ||
      !Look(form, form->tensors_offset, form->tensor_count * sizeof(TensorEntry))) {
    return false;
  }
  form->input_count = static_cast<int>(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *name, *shape, *descr;
    unsigned long long item_size;
    if (!PyArg_ParseTuple(PyTuple_GetItem(inputs, i), "OOOK", &name, &shape, &descr, &item_size)) return false;
    Tensor& input = form->inputs[i];
    if (!ReadTensor(name, shape, descr, &input)) return false;
    input.item_size = item_size;
    const auto entry = ReadAt<TensorEntry>(record, form->tensors_offset + i * sizeof(TensorEntry));
    if (!Look(form, entry.dims_offset, input.nd * sizeof(int64_t))) return false;
  }
  return true;
}

PyObject* ListOf(const uint32_t* numbers, uint32_t count) {
  PyObject* list = PyList_New(0);
  for (uint32_t i = 0; list != nullptr && i < count; ++i) {
    PyObject* number = PyLong_FromLongLong(numbers[i]);
    if (number == nullptr || PyList_Append(list, number) != 0) Clear(list);
    Clear(number);
  }
  return list;
}

// Takes rows, dimensions and places from a record, with the checks of `wire.batch`. Returns false if they are wrong or
// not for the accelerator, or with an exception. `differ` is set if any is not the same as in the form's metadata.
bool TakeSizes(BatchForm* form, const RecordHeader& header, const char* record, bool* differ) {
  uint64_t total_rows = 0, input_bytes = 0;
  *differ = false;
  for (uint32_t i = 0; i < form->entry_count; ++i) {
    const uint64_t at = form->entries_offset + i * sizeof(RequestEntry) + offsetof(RequestEntry, rows);
    const auto rows = ReadAt<uint32_t>(record, at);
    *differ |= rows != ReadAt<uint32_t>(form->metadata, at);
    if (rows != form->row_counts[i]) Clear(form->rows);
    form->row_counts[i] = rows;
    total_rows += rows;
  }
  for (int i = 0; i < form->input_count; ++i) {
    Tensor& input = form->inputs[i];
    const uint64_t at = form->tensors_offset + i * sizeof(TensorEntry);
    const auto entry = ReadAt<TensorEntry>(record, at);
    for (int axis = 0; axis < input.nd; ++axis) {
      input.dims[axis] = ReadAt<int64_t>(record, entry.dims_offset + axis * sizeof(int64_t));
    }
    input.offset = entry.payload_offset;
    input.length = BytesOf(input, input.dims);
    if (input.length == 0 || input.length != entry.payload_length || input.offset % kAlignment != 0 ||
        input.offset < header.metadata_length || input.offset > header.record_length ||
        input.length > header.record_length - input.offset ||
        (form->batching && (input.nd == 0 || static_cast<uint64_t>(input.dims[0]) != total_rows))) {
      return false;
    }
    input_bytes += input.length;
    constexpr uint64_t kPlace = offsetof(TensorEntry, payload_offset);
    *differ |= memcmp(record + at + kPlace, form->metadata + at + kPlace, sizeof(uint64_t) * 2) != 0 ||
               memcmp(record + entry.dims_offset, form->metadata + entry.dims_offset, input.nd * sizeof(int64_t)) != 0;
  }
  form->total_rows = total_rows;
  form->input_bytes = input_bytes;
  if (form->rows == nullptr) form->rows = ListOf(form->row_counts, form->entry_count);
  return form->rows != nullptr;
}

bool HasText(const Text& text, const RecordHeader& header, const char* record) {
  const auto ref = ReadAt<StringRef>(record, text.ref);
  return ref.length == text.length && LiesInside(ref, header.metadata_length) &&
         (ref.length == 0 || memcmp(record + ref.offset, text.data, text.length) == 0);
}

}  // namespace

BatchForm* MakeBatchForm(const RecordHeader& header, const char* record, PyObject* described) {
  auto* form = MakeArray<BatchForm>(1);
  if (form == nullptr) return nullptr;
  if (ReadBatchForm(header, record, described, form)) {
    if (Match(form, header, record) != Likeness::kOther) return form;
    if (PyErr_Occurred() == nullptr) PyErr_Format(PyExc_ValueError, "a form that its own record has not");
  }
  FreeBatchForm(form);
  return nullptr;
}

Likeness Match(BatchForm* form, const RecordHeader& header, const char* record) {
  if (form->entry_count != header.entry_count || form->tensor_count != header.tensor_count ||
      form->entries_offset != header.entries_offset || form->tensors_offset != header.tensors_offset ||
      header.metadata_length < form->end || (form->limit != 0 && header.record_length >= form->limit)) {
    return Likeness::kOther;
  }
  for (Py_ssize_t i = 0; i < form->fixed_count; ++i) {
    const Piece& piece = form->fixed[i];
    if (memcmp(form->metadata + piece.offset, record + piece.offset, piece.length) != 0) return Likeness::kOther;
  }
  for (Py_ssize_t i = 0; i < form->text_count; ++i) {
    if (!HasText(form->texts[i], header, record)) return Likeness::kOther;
  }
  bool differ;
  if (!TakeSizes(form, header, record, &differ)) return Likeness::kOther;
  if (differ) return Likeness::kResized;
  constexpr uint64_t kHeader = sizeof(RecordHeader);
  const bool is_same = header.metadata_length == form->metadata_length &&
                       memcmp(form->metadata + kHeader, record + kHeader, form->metadata_length - kHeader) == 0;
  return is_same ? Likeness::kSame : Likeness::kAlike;
}

void FreeBatchForm(BatchForm* form) {
  for (int i = 0; i < form->reply_count; ++i) FreeReplyForm(form->replies[i]);
  FreeTensors(form->inputs, form->input_count);
  Clear(form->python);
  Clear(form->rows);
  free(form->row_counts);
  free(form->fixed);
  free(form->texts);
  free(form->metadata);
  free(form);
}

ReplyForm* AddReplyForm(BatchForm* form, PyObject* laid_out) {
  auto* made = MakeArray<ReplyForm>(1);
  if (made == nullptr) return nullptr;
  if (!ReadReplyForm(*form, laid_out, made)) {
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
    if (Fits(form->replies[i], *form, result)) return form->replies[i];
  }
  return nullptr;
}

}  // namespace pytriton
