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

// The metadata up to the payloads, for Python; None where they are those of the form. Null with an exception.
PyObject* RawOf(const RecordHeader& header, const char* record, Likeness likeness);

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
