#include "plain.h"

#include <time.h>

#include <cstring>

namespace pytriton {

uint64_t Now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ull + time.tv_nsec;
}

PyObject* TakeError() {
  if (PyErr_Occurred() == nullptr) return nullptr;
  PyObject *kind, *error, *trace;
  PyErr_Fetch(&kind, &error, &trace);
  PyErr_NormalizeException(&kind, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  Clear(kind);
  Clear(trace);
  return error;
}

Counts* CountsAt(unsigned long long address, Py_ssize_t count) {
  if (count * sizeof(uint64_t) == sizeof(Counts)) return reinterpret_cast<Counts*>(address);
  PyErr_Format(PyExc_ValueError, "%zd counters, %zd expected", count, sizeof(Counts) / sizeof(uint64_t));
  return nullptr;
}

void Count(
    Counts* counts, const BatchForm& batch, const RecordHeader& record, const ReplyForm& reply, uint64_t called_ns,
    uint64_t spent_ns) {
  const uint64_t rows = batch.total_rows;
  counts->requests += batch.entry_count;
  counts->rows += rows;
  counts->row_counts[rows <= 1 ? 0 : 64 - __builtin_clzll(rows - 1)] += 1;
  counts->input_bytes += batch.input_bytes;
  counts->output_bytes += reply.payload_bytes;
  // A time of sending by another clock, or none, is not counted.
  if (record.sent_ns != 0 && record.sent_ns < called_ns) counts->queued_ns += called_ns - record.sent_ns;
  counts->callable_ns += spent_ns;
  // The two bits behind the highest one select the part of its power of two.
  const int length = spent_ns == 0 ? 0 : 64 - __builtin_clzll(spent_ns);
  const uint64_t part = length < 3 ? 0 : (spent_ns >> (length - 3)) % kCountedParts;
  counts->callable_counts[length * kCountedParts + part] += 1;
}

BatchForm* FindForm(
    Forms* forms, PyObject* describe, const RecordHeader& header, const char* record, Likeness* likeness) {
  for (int i = -1; i < forms->count; ++i) {
    const int place = i < 0 ? forms->last : i;  // the form of the last batch is tried first
    if (forms->count == 0) break;
    *likeness = Match(forms->made[place], header, record);
    if (*likeness != Likeness::kOther) {
      forms->last = place;
      return forms->made[place];
    }
    if (PyErr_Occurred() != nullptr) return nullptr;
  }
  *likeness = Likeness::kSame;
  PyObject* described = PyObject_CallFunction(
      describe, "N(IIKII)", PyBytes_FromStringAndSize(record, static_cast<Py_ssize_t>(header.metadata_length)),
      header.entry_count, header.tensor_count, static_cast<unsigned long long>(header.record_length),
      header.entries_offset, header.tensors_offset);
  if (described == nullptr) return nullptr;
  BatchForm* made = described == &_Py_NoneStruct ? nullptr : MakeBatchForm(header, record, described);
  Py_DecRef(described);
  if (made == nullptr) return nullptr;
  if (forms->count < kMaxBatchForms) {
    forms->last = forms->count++;
  } else {
    forms->last = forms->next++ % kMaxBatchForms;
    FreeBatchForm(forms->made[forms->last]);
  }
  forms->made[forms->last] = made;
  return made;
}

void FreeForms(Forms* forms) {
  while (forms->count > 0) FreeBatchForm(forms->made[--forms->count]);
  forms->last = 0;
}

PyObject* MakeColumns(const BatchForm& form, char* record, PyObject* base) {
  PyObject* columns = PyDict_New();
  if (columns == nullptr) return nullptr;
  for (int i = 0; i < form.input_count; ++i) {
    const Tensor& tensor = form.inputs[i];
    Py_IncRef(tensor.descr);
    PyObject* array = numpy.new_from_descr(
        numpy.array_type, tensor.descr, tensor.nd, tensor.dims, nullptr, record + tensor.offset,
        kContiguous | kAligned | kWriteable, nullptr);
    bool is_good = array != nullptr;
    if (is_good) {
      Py_IncRef(base);
      is_good = numpy.set_base_object(array, base) == 0 && PyDict_SetItem(columns, tensor.name, array) == 0;
      Py_DecRef(array);
    }
    if (!is_good) {
      Py_DecRef(columns);
      return nullptr;
    }
  }
  return columns;
}

PyObject* MakeRequests(
    PyTypeObject* type, PyObject* make, PyObject* block, const BatchForm& form, const RecordHeader& header, char* record,
    const char* metadata, Likeness likeness) {
  PyObject* columns = MakeColumns(form, record, block);
  PyObject* raw = likeness == Likeness::kSame
                      ? NewNone()
                      : PyBytes_FromStringAndSize(metadata, static_cast<Py_ssize_t>(header.metadata_length));
  PyObject* made = columns == nullptr || raw == nullptr ? nullptr : PyType_GenericAlloc(type, 0);
  if (made == nullptr) {
    Clear(columns);
    Clear(raw);
    Py_DecRef(block);
    return nullptr;
  }
  auto* requests = reinterpret_cast<Requests*>(made);
  requests->make = make;
  requests->block = block;
  requests->columns = columns;
  requests->metadata = form.python;
  requests->raw = raw;
  requests->likeness = likeness;
  Py_IncRef(requests->make);
  Py_IncRef(requests->metadata);
  requests->number = header.batch;
  requests->received_ns = header.received_ns;
  requests->sent_ns = header.sent_ns;
  return made;
}

void FreeRequests(PyObject* self) {
  auto* requests = reinterpret_cast<Requests*>(self);
  Clear(requests->make);
  Clear(requests->columns);
  Clear(requests->metadata);
  Clear(requests->raw);
  Py_DecRef(requests->block);
  FreeObject(self);
}

ReplyForm* FormOf(BatchForm* batch, PyObject* lay_out, PyObject* raw, Likeness likeness, PyObject* result) {
  ReplyForm* form = FindReplyForm(batch, result);
  if (form != nullptr) return form;
  PyObject* laid_out = PyObject_CallFunction(
      lay_out, "OOiO", batch->python, raw, likeness == Likeness::kResized ? 1 : 0, result);
  if (laid_out == nullptr) return nullptr;
  form = laid_out == &_Py_NoneStruct ? nullptr : AddReplyForm(batch, laid_out);
  Py_DecRef(laid_out);
  // The new form is looked up, not returned, because what Python saw may have changed since.
  return form == nullptr ? nullptr : FindReplyForm(batch, result);
}

void CopyPayloads(const ReplyForm& form, char* record) {
  for (Py_ssize_t i = 0; i < form.piece_count; ++i) {
    memcpy(record + form.pieces[i].offset, form.found[i]->data, form.pieces[i].length);
  }
}

void WriteMetadata(const ReplyForm& form, uint64_t number, char* record) {
  memcpy(record, form.metadata, form.metadata_length);
  memcpy(record + offsetof(RecordHeader, batch), &number, sizeof(number));
}

}  // namespace pytriton
