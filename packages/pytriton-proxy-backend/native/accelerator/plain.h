// What becomes of a plain batch wherever it comes from: its form is found, its arrays are made, what the callable
// returned is compared and written, the call is counted.
#pragma once

#include "forms.h"

namespace pytriton {

constexpr int kMaxBatchForms = 128;

// What is counted, in the array of `runtime.statistics.Counters`.
struct Counts {
  uint64_t requests, rows, input_bytes, output_bytes, callable_ns, queued_ns;
  uint64_t row_counts[kCountedBuckets], callable_counts[kCountedBuckets * kCountedParts];
};

// The place of `count` numbers for them; null with an exception where that is not their number.
Counts* CountsAt(unsigned long long address, Py_ssize_t count);
void Count(
    Counts* counts, const BatchForm& batch, const RecordHeader& record, const ReplyForm& reply, uint64_t called_ns,
    uint64_t spent_ns);

// The forms that batches have had so far.
struct Forms {
  BatchForm* made[kMaxBatchForms];
  int count, last, next;
};

// The form of a record, for which `describe` may be asked; null where it has none, or with an exception.
BatchForm* FindForm(
    Forms* forms, PyObject* describe, const RecordHeader& header, const char* record, Likeness* likeness);
void FreeForms(Forms* forms);

// The inputs by name, as arrays whose base is `base`; null with an exception.
PyObject* MakeColumns(const BatchForm& form, char* record, PyObject* base);

// A batch whose requests are made when somebody asks for them. An object of Python's.
struct Requests {
  PyObject head;
  PyObject* make;   // of its own, as it may outlive its lane
  PyObject* block;  // the base of the arrays, which keeps their memory
  PyObject *columns, *metadata;
  PyObject* raw;       // the record up to its payloads, or None where it is that of the metadata
  Likeness likeness;   // of the record and the metadata
  uint64_t number, received_ns, sent_ns;
};

// Makes an object of a type that begins with `Requests`; null with an exception. Takes `block`. `metadata` is where the record
// is read up to its payloads: at its place, or a copy that nobody changes.
PyObject* MakeRequests(
    PyTypeObject* type, PyObject* make, PyObject* block, const BatchForm& form, const RecordHeader& header, char* record,
    const char* metadata, Likeness likeness);
void FreeRequests(PyObject* self);

// Hands what Python's `_make_batch` is given to `use`: "OOiOOKKK" as a format has it.
template <typename Use>
PyObject* WithParts(const Requests& requests, const Use& use) {
  using Number = unsigned long long;
  return use(
      requests.metadata, requests.raw, requests.likeness == Likeness::kResized ? 1 : 0, requests.block, requests.columns,
      Number{requests.number}, Number{requests.received_ns}, Number{requests.sent_ns});
}

// The form of what a callable returned, for which `lay_out` may be asked, with the arrays in its `found`; null where it
// has none, or with an exception. `raw` and `likeness` are those of the batch.
ReplyForm* FormOf(BatchForm* batch, PyObject* lay_out, PyObject* raw, Likeness likeness, PyObject* result);
void CopyPayloads(const ReplyForm& form, char* record);
void WriteMetadata(const ReplyForm& form, uint64_t number, char* record);

// Nanoseconds of the clock of `time.monotonic_ns`.
uint64_t Now();

// What was raised, as one object with its traceback, which is taken from the thread; null where nothing was.
PyObject* TakeError();

}  // namespace pytriton
