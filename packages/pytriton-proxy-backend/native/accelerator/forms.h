// What batches and outputs look like that Python has checked once: those that come are compared with it.
#pragma once

#include "../python/numpy_abi.h"
#include "../src/protocol.h"

namespace pytriton {

constexpr int kMaxDims = 8;
constexpr int kMaxInputs = 32;
constexpr int kMaxReplyForms = 8;

// A numeric tensor at its place in a record.
struct Tensor {
  PyObject* name;
  PyObject* descr;
  int nd;
  Py_ssize_t dims[kMaxDims];
  uint64_t offset;
  uint64_t length;
};

// What a callable returned that Python has checked, and the record that it has laid out for all that look the same.
struct ReplyForm {
  bool is_list;            // of a dictionary per request; else one dictionary over the whole batch
  Py_ssize_t count;        // of dictionaries
  Py_ssize_t* sizes;       // how many outputs each has
  Py_ssize_t piece_count;
  Tensor* pieces;          // all that is sent, dictionary by dictionary
  Py_ssize_t* owners;      // by piece: its dictionary
  Array** found;           // by piece: what the last comparison found, borrowed
  char* metadata;
  uint64_t metadata_length;
  uint64_t length;         // of the record
  uint64_t payload_bytes;
};

// A piece of metadata that may differ in records of the same form, from the end of the header.
struct Gap {
  uint64_t offset, length;
};

// The metadata of batches that Python has checked.
struct BatchForm {
  char* metadata;  // behind the header
  uint64_t metadata_length;
  Gap* gaps;  // in order
  Py_ssize_t gap_count;
  uint32_t entry_count, tensor_count, entries_offset, tensors_offset;
  uint64_t record_length;
  PyObject* python;  // a wire.batch.BatchMetadata
  PyObject* rows;    // by request
  uint64_t total_rows, input_bytes;
  int input_count;
  Tensor* inputs;
  ReplyForm* replies[kMaxReplyForms];
  int reply_count, next_reply;
};

// Makes a form of what Python's `describe` returned for a record; null with an exception.
BatchForm* MakeBatchForm(const RecordHeader& header, const char* record, PyObject* described);
enum class Likeness { kOther, kAlike, kSame };  // kAlike: but for what is in the gaps
Likeness Compare(const BatchForm& form, const RecordHeader& header, const char* record);
void FreeBatchForm(BatchForm* form);

// Makes a form of what Python's `lay_out` returned for a result, and keeps it with its batch; null with an exception.
ReplyForm* AddReplyForm(BatchForm* form, PyObject* laid_out);
// The form that a result has, whose arrays are in `found` then; null where there is none yet.
ReplyForm* FindReplyForm(BatchForm* form, PyObject* result);

}  // namespace pytriton
