// What happens to a plain batch, whether it comes from a socket or in process: finds its form, makes its arrays,
// compares and writes what the callable returned, and counts the call.
#pragma once

#include "forms.h"

namespace pytriton {

constexpr int kMaxBatchForms = 128;

// The numbers that are counted, in the array of `runtime.statistics.Counters`.
struct Counts {
  uint64_t requests, rows, input_bytes, output_bytes, callable_ns, queued_ns;
  uint64_t row_counts[kCountedBuckets], callable_counts[kCountedBuckets * kCountedParts];
};

// Returns the numbers at an address; null with an exception if there are not `count` of them.
Counts* CountsAt(unsigned long long address, Py_ssize_t count);
void Count(
    Counts* counts, const BatchForm& batch, const RecordHeader& record, const ReplyForm& reply, uint64_t called_ns,
    uint64_t spent_ns);

// The forms of the batches so far.
struct Forms {
  BatchForm* made[kMaxBatchForms];
  int count, last, next;
};

// Returns the form of a record, and may call `describe` for a new one; null if it has none, or with an exception.
BatchForm* FindForm(
    Forms* forms, PyObject* describe, const RecordHeader& header, const char* record, Likeness* likeness);
void FreeForms(Forms* forms);

// Makes the inputs by name, as arrays whose base is `base`; null with an exception.
PyObject* MakeColumns(const BatchForm& form, char* record, PyObject* base);

// A batch as a Python object, which makes the requests only when somebody reads them.
struct Requests {
  PyObject head;
  PyObject* make;   // a reference of its own, because the object may live longer than its lane
  PyObject* block;  // the base of the arrays, which keeps their memory
  PyObject *columns, *metadata;
  PyObject* raw;       // the record up to its payloads, or None if it is that of the metadata
  Likeness likeness;   // of the record and the metadata
  uint64_t number, received_ns, sent_ns;
};

// Makes an object of a type that begins with `Requests`; null with an exception. Takes `block`. `metadata` is the
// record up to its payloads, at its place or as a copy that nobody changes.
PyObject* MakeRequests(
    PyTypeObject* type, PyObject* make, PyObject* block, const BatchForm& form, const RecordHeader& header, char* record,
    const char* metadata, Likeness likeness);
void FreeRequests(PyObject* self);

// Calls `use` with the arguments of Python's `_make_batch`, for the format "OOiOOKKK".
template <typename Use>
PyObject* WithParts(const Requests& requests, const Use& use) {
  using Number = unsigned long long;
  return use(
      requests.metadata, requests.raw, requests.likeness == Likeness::kResized ? 1 : 0, requests.block, requests.columns,
      Number{requests.number}, Number{requests.received_ns}, Number{requests.sent_ns});
}

// Returns the form of what a callable returned, with the arrays in its `found`, and may call `lay_out` for a new one;
// null if it has none, or with an exception. `raw` and `likeness` are those of the batch.
ReplyForm* FormOf(BatchForm* batch, PyObject* lay_out, PyObject* raw, Likeness likeness, PyObject* result);
void CopyPayloads(const ReplyForm& form, char* record);
void WriteMetadata(const ReplyForm& form, uint64_t number, char* record);

// The time in nanoseconds, by the clock of `time.monotonic_ns`.
uint64_t Now();

// Takes the raised exception from the thread, as one object with its traceback; null if there is none.
PyObject* TakeError();

}  // namespace pytriton
