// What batches and outputs look like that Python has checked once: those that come are compared with it.
//
// Sizes may differ from what was checked: rows, dimensions and the places of payloads. They are read anew for each
// batch, and are what `BatchForm` and `ReplyForm` hold until the next one.
#pragma once

#include "../python/numpy_abi.h"
#include "../proxy/protocol.h"

namespace pytriton {

constexpr int kMaxReplyForms = 8;

// A numeric tensor at its place in a record.
struct Tensor {
  PyObject* name;
  PyObject* descr;
  uint64_t item_size;
  int nd;
  Py_ssize_t dims[kAcceleratedDims];
  uint64_t offset;
  uint64_t length;
};

// What a callable returned that Python has checked, and the record that it has laid out for all that look the same.
struct ReplyForm {
  bool is_list;            // of a dictionary per request; else one dictionary over the whole batch
  bool is_sized;           // dimensions may differ
  bool is_joined;          // along the batch axis
  Py_ssize_t count;        // of dictionaries
  Py_ssize_t* sizes;       // how many outputs each has
  Py_ssize_t piece_count;
  Tensor* pieces;          // all that is sent, dictionary by dictionary
  Py_ssize_t* owners;      // by piece: its dictionary
  Array** found;           // by piece: what the last comparison found, borrowed
  Py_ssize_t tensor_count;
  Tensor* tensors;         // of the record, where `is_sized`: a dimension of -1 may be any
  uint64_t limit;          // payloads have less bytes than that, where `is_sized`; 0 is none
  uint32_t entry_count;
  uint32_t* rows;          // of each request, as they are in `metadata`
  char* metadata;
  uint64_t metadata_length;
  uint64_t length;         // of the record
  uint64_t payload_bytes;
};

// A piece of metadata, from the begin of the record.
struct Piece {
  uint64_t offset, length;
};

// A text that metadata refer to, wherever it lies.
struct Text {
  uint64_t ref;  // where its `StringRef` is
  uint32_t length;
  const char* data;  // in the metadata of the form
};

// The metadata of batches that Python has checked.
struct BatchForm {
  char* metadata;
  uint64_t metadata_length;
  Piece* fixed;  // what is the same in all of them
  Py_ssize_t fixed_count;
  Text* texts;  // likewise
  Py_ssize_t text_count;
  uint64_t end;  // of all that is looked at, but for texts
  uint64_t limit;  // records are shorter than that; 0 is none
  bool batching;
  uint32_t entry_count, tensor_count, entries_offset, tensors_offset;
  PyObject* python;     // a wire.batch.BatchMetadata
  uint32_t* row_counts;  // by request
  PyObject* rows;        // the same for Python
  uint64_t total_rows, input_bytes;
  int input_count;
  Tensor* inputs;
  ReplyForm* replies[kMaxReplyForms];
  int reply_count, next_reply;
};

// Makes a form of what Python's `describe` returned for a record; null where its sizes do not fit, or with an exception.
BatchForm* MakeBatchForm(const RecordHeader& header, const char* record, PyObject* described);
// kSame: to the byte. kAlike: but for what nobody reads before somebody asks for it. kResized: sizes differ as well.
enum class Likeness { kOther, kResized, kAlike, kSame };
// Compares a record with those of a form, and takes its sizes; kOther may be with an exception.
Likeness Match(BatchForm* form, const RecordHeader& header, const char* record);
void FreeBatchForm(BatchForm* form);

// Makes a form of what Python's `lay_out` returned for a result, and keeps it with its batch; null with an exception.
ReplyForm* AddReplyForm(BatchForm* form, PyObject* laid_out);
// The form that a result has, whose arrays are in `found` then; null where there is none yet.
ReplyForm* FindReplyForm(BatchForm* form, PyObject* result);

}  // namespace pytriton
