// Batches and results that Python has checked once, so that later ones are only compared with them.
//
// Rows, dimensions and the places of payloads may differ from what was checked. They are read again for each batch, and
// `BatchForm` and `ReplyForm` hold them until the next one.
#pragma once

#include "../proxy/wire/protocol.h"
#include "../python/numpy_abi.h"

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

// A result of a callable that Python has checked, and the record that Python has laid out for all results of this form.
struct ReplyForm {
  bool is_list;            // a dictionary for each request; otherwise one dictionary for the whole batch
  bool is_sized;           // dimensions may differ
  bool is_joined;          // outputs are joined along the batch axis
  Py_ssize_t count;        // the number of dictionaries
  Py_ssize_t* sizes;       // how many outputs each dictionary has
  Py_ssize_t piece_count;
  Tensor* pieces;          // all arrays that are sent, dictionary by dictionary
  Py_ssize_t* owners;      // the dictionary of each piece
  Array** found;           // the array of each piece that the last comparison found, borrowed
  Py_ssize_t tensor_count;
  Tensor* tensors;         // the tensors of the record, if `is_sized`; a dimension of -1 may have any size
  uint64_t limit;          // payloads have fewer bytes than this, if `is_sized`; 0 for no limit
  uint32_t entry_count;
  uint32_t* rows;          // of each request, as they are in `metadata`
  char* metadata;
  uint64_t metadata_length;
  uint64_t length;         // of the record
  uint64_t payload_bytes;
};

// A piece of metadata at an offset from its beginning.
struct Piece {
  uint64_t offset, length;
};

// A text to which metadata refer, wherever it lies.
struct Text {
  uint64_t ref;  // where the `StringRef` to it lies
  uint32_t length;
  const char* data;  // where the text lies in the form's metadata
};

// The metadata of batches of one form, which Python has checked.
struct BatchForm {
  char* metadata;
  uint64_t metadata_length;
  Piece* fixed;  // the pieces that are the same in all of them
  Py_ssize_t fixed_count;
  Text* texts;  // the texts that are the same in all of them
  Py_ssize_t text_count;
  uint64_t end;  // the end of everything that is compared but texts
  uint64_t limit;  // records are shorter than this; 0 for no limit
  bool batching;
  uint32_t entry_count, tensor_count, entries_offset, tensors_offset;
  PyObject* python;     // the wire.batch.BatchMetadata
  uint32_t* row_counts;  // the rows of each request
  PyObject* rows;        // the same as a Python object
  uint64_t total_rows, input_bytes;
  int input_count;
  Tensor* inputs;
  ReplyForm* replies[kMaxReplyForms];
  int reply_count, next_reply;
};

// Makes a form of what Python's `describe` returned for a record; null if its sizes do not fit, or with an exception.
BatchForm* MakeBatchForm(const RecordHeader& header, const char* record, PyObject* described);
// kSame: every byte is the same. kAlike: only what is read on demand differs, such as ids. kResized: sizes differ, too.
enum class Likeness { kOther, kResized, kAlike, kSame };
// Compares a record with a form, and takes the record's sizes over. There may be an exception if it returns kOther.
Likeness Match(BatchForm* form, const RecordHeader& header, const char* record);
void FreeBatchForm(BatchForm* form);

// Makes a form of what Python's `lay_out` returned for a result, and keeps it in the batch's form; null with an
// exception.
ReplyForm* AddReplyForm(BatchForm* form, PyObject* laid_out);
// Returns the form of a result and puts the result's arrays into its `found`; null if there is none yet.
ReplyForm* FindReplyForm(BatchForm* form, PyObject* result);

}  // namespace pytriton
