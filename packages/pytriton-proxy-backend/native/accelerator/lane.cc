// Serves a plain batch: packet -> arrays -> callable -> record -> packet. The only Python code in it is the callable.
//
// The first time, Python checks the batch, and checks and lays out what the callable returns. Later batches and results
// are compared with these, except for their sizes. `run` ends with anything else, which Python then handles: a packet
// as it came, or a call that was made. Between two runs, a lane knows nothing of its connection.
//
// The code has neither destructors nor exceptions, because a daemon thread of an interpreter that ends never returns
// from `PyEval_RestoreThread`.
#include "lane.h"

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>

#include "plain.h"

namespace pytriton {
namespace {

constexpr int kMostMapped = 16;
constexpr int kReceiveFlags = MSG_CMSG_CLOEXEC | MSG_TRUNC;
// After so many batches of one request in a row the caller counts as alone, as in the native proxy.
constexpr uint32_t kInRow = 8;
// A thread that polls for a batch and loses the processor for so long keeps another thread from running. It then does
// not poll for so many batches, and each further time in a row for twice as many.
constexpr uint64_t kAwayNs = 1000 * 1000;
constexpr uint32_t kShortestRest = 64;
constexpr uint32_t kLongestRest = 1 << 16;

struct Segment {
  uint32_t number;
  char* data;
  uint64_t size;
  PyObject* memory;  // keeps the memory mapped
};

// Where the record of a response is written: a block of ours that is used again and again.
struct ReplyBlock {
  bool is_there;
  uint32_t segment;
  uint64_t offset;
  uint64_t capacity;
  char* data;
};

struct Block;

struct Lane {
  PyObject head;
  bool is_open;
  int fd;
  bool takes_columns;
  PyObject *callable, *buffer, *counters;
  PyObject *describe, *lay_out, *make_room, *is_lent, *acknowledge, *segment, *make_requests, *released, *note_released,
      *give_back;
  char* packet;
  uint64_t packet_size;
  Counts* counts;
  char* metadata;  // a copy of what is compared, because the shared memory may change
  Forms forms;
  uint64_t look_ns;      // how long to poll for the next batch of a lone caller; 0 for not at all
  uint64_t answered_ns;  // when the last batch was answered
  uint32_t lone;         // how many batches in a row were of one request
  bool came_soon;        // the last batch came within `look_ns` of the answer before it
  uint32_t rest;         // for how many more batches nothing polls
  uint32_t next_rest;
  // The segments that one run uses.
  Segment segments[kMostMapped];
  int segment_count;
  // There are two, because the proxy backend may send a batch before it has acknowledged the response to the one before.
  ReplyBlock replies[2];
  int newest;          // the block of the last response
  uint64_t in_flight;  // how many of these two were sent and are not acknowledged
  uint64_t sent;       // how many responses were sent
  uint64_t pending;    // how many responses in other blocks, all of them older, are not acknowledged
  Block* current;    // the block of the current batch, as long as anything refers to it
  uint64_t held;     // how many blocks exist
};

// The memory of a batch as the base object of its arrays. It lives as long as anything refers to it.
struct Block {
  PyObject head;
  Lane* lane;
  PyObject* memory;
  PyObject* note_released;  // a reference of its own, because a block may live after the lane is closed
  const char* data;
  uint64_t length;
  uint32_t segment;
  uint64_t offset;
};

PyTypeObject* block_type;
PyTypeObject* requests_type;

// ---- what Python sees of a batch ------------------------------------------------------------------------------------

// This may run in any thread at any time; the thread that drops the last view has the GIL.
void FreeBlock(PyObject* self) {
  auto* block = reinterpret_cast<Block*>(self);
  Lane* lane = block->lane;
  if (lane->current == block) {
    lane->current = nullptr;
  } else {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyObject* done = PyObject_CallFunction(
        block->note_released, "((IK))", static_cast<unsigned>(block->segment),
        static_cast<unsigned long long>(block->offset));
    if (done == nullptr) {
      PyErr_WriteUnraisable(block->note_released);
    } else {
      Py_DecRef(done);
    }
    PyErr_Restore(kind, error, trace);
  }
  // This comes last, because a worker sleeps only when no block is held and none is to be given back.
  --lane->held;
  Clear(block->memory);
  Clear(block->note_released);
  FreeObject(self);
  Py_DecRef(&lane->head);
}

PyObject* BlockItem(PyObject* self, Py_ssize_t at) {
  auto* block = reinterpret_cast<Block*>(self);
  if (at < 0 || static_cast<uint64_t>(at) >= block->length) {
    return PyErr_Format(PyExc_IndexError, "byte %zd of a block", at);
  }
  return PyLong_FromLong(static_cast<uint8_t>(block->data[at]));
}

PyObject* CallRequests(PyObject* self, PyObject*, PyObject*) {
  const auto& requests = *reinterpret_cast<Requests*>(self);
  return WithParts(
      requests, [&requests](auto... parts) { return PyObject_CallFunction(requests.make, "OOiOOKKK", parts...); });
}

// ---- a batch that came ----------------------------------------------------------------------------------------------

struct Incoming {
  Message message;
  RecordHeader record;
  const Segment* segment;
  char* data;
  BatchForm* form;
  Likeness likeness;
};

enum class Outcome { kPlain, kOther, kError };

// Returns the segment of a number; null if there is none, or with an exception.
const Segment* FindSegment(Lane* lane, uint32_t number) {
  for (int i = 0; i < lane->segment_count; ++i) {
    if (lane->segments[i].number == number) return &lane->segments[i];
  }
  if (lane->segment_count == kMostMapped) return nullptr;
  PyObject* told = PyObject_CallFunction(lane->segment, "I", static_cast<unsigned>(number));
  if (told == nullptr) return nullptr;
  const Segment* found = nullptr;
  if (told != &_Py_NoneStruct) {
    PyObject* memory;
    unsigned long long address, size;
    if (PyArg_ParseTuple(told, "OKK", &memory, &address, &size)) {
      Py_IncRef(memory);
      Segment& segment = lane->segments[lane->segment_count++];
      segment = {number, reinterpret_cast<char*>(address), size, memory};
      found = &segment;
    }
  }
  Py_DecRef(told);
  return found;
}

// Polls for a packet and yields to other threads meanwhile. Negative if none came.
ssize_t Look(Lane* lane, msghdr* header) {
  const uint64_t until_ns = lane->answered_ns + lane->look_ns;
  uint64_t now_ns = Now();
  while (now_ns < until_ns) {
    const ssize_t size = recvmsg(lane->fd, header, kReceiveFlags | MSG_DONTWAIT);
    if (size >= 0) {
      lane->next_rest = kShortestRest;
      return size;
    }
    sched_yield();
    const uint64_t before_ns = now_ns;
    now_ns = Now();
    if (now_ns - before_ns > kAwayNs) {
      lane->rest = lane->next_rest;
      if (lane->next_rest < kLongestRest) lane->next_rest *= 2;
      break;
    }
  }
  return -1;
}

// Waits for a packet, at most for the timeout of the socket.
ssize_t Receive(Lane* lane, msghdr* header) {
  ssize_t size = -1;
  PyThreadState* state = PyEval_SaveThread();
  if (lane->lone > kInRow && lane->came_soon && lane->rest == 0) size = Look(lane, header);
  if (size < 0) size = recvmsg(lane->fd, header, kReceiveFlags);
  const int saved = errno;
  PyEval_RestoreThread(state);
  errno = saved;
  return size;
}

// Notes how soon a batch came.
void NotePace(Lane* lane, const RecordHeader& record) {
  if (lane->look_ns == 0) return;
  lane->lone = record.entry_count == 1 ? lane->lone + 1 : 0;
  lane->came_soon = Now() - lane->answered_ns < lane->look_ns;
  if (lane->rest > 0) lane->rest -= 1;
}

// Notes which responses the proxy backend has read. Returns false if the count is impossible, or with an exception.
bool TakeAcknowledgement(Lane* lane, uint64_t consumed) {
  if (consumed > lane->sent) return false;
  const uint64_t others = lane->sent - lane->in_flight;
  if (lane->pending != 0) {
    PyObject* left = PyObject_CallFunction(
        lane->acknowledge, "K", static_cast<unsigned long long>(consumed < others ? consumed : others));
    if (left == nullptr) return false;
    lane->pending = PyLong_AsLongLong(left);
    Py_DecRef(left);
  }
  // Otherwise the count is older than one that came before.
  if (consumed > others) lane->in_flight = lane->sent - consumed;
  return true;
}

Outcome Recognise(Lane* lane, ssize_t size, const msghdr& header, Incoming* batch) {
  if (size != sizeof(Message) || header.msg_controllen != 0 || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return Outcome::kOther;
  }
  Message& message = batch->message;
  memcpy(&message, lane->packet, sizeof(message));
  if (message.type != static_cast<uint16_t>(MessageType::kBatch) || message.size != sizeof(Message)) {
    return Outcome::kOther;
  }
  if (!TakeAcknowledgement(lane, message.consumed)) {
    return PyErr_Occurred() == nullptr ? Outcome::kOther : Outcome::kError;
  }
  batch->segment = FindSegment(lane, message.segment);
  if (batch->segment == nullptr) return PyErr_Occurred() == nullptr ? Outcome::kOther : Outcome::kError;
  const uint64_t room = batch->segment->size;
  if (message.offset % kAlignment != 0 || message.offset > room || message.length > room - message.offset ||
      message.length < sizeof(RecordHeader)) {
    return Outcome::kOther;
  }
  batch->data = batch->segment->data + message.offset;
  RecordHeader& record = batch->record;
  memcpy(&record, batch->data, sizeof(record));
  if (record.magic != kBatchMagic || record.batch != message.batch || record.metadata_length < sizeof(RecordHeader) ||
      record.metadata_length > record.record_length || record.record_length > message.length ||
      record.metadata_length > kComparedBytes) {
    return Outcome::kOther;
  }
  NotePace(lane, record);
  memcpy(lane->metadata, batch->data, record.metadata_length);
  batch->form = FindForm(&lane->forms, lane->describe, record, lane->metadata, &batch->likeness);
  if (batch->form == nullptr) return PyErr_Occurred() == nullptr ? Outcome::kOther : Outcome::kError;
  return Outcome::kPlain;
}

Block* MakeBlock(Lane* lane, const Incoming& batch) {
  auto* block = reinterpret_cast<Block*>(PyType_GenericAlloc(block_type, 0));
  if (block == nullptr) return nullptr;
  block->lane = lane;
  block->memory = batch.segment->memory;
  block->note_released = lane->note_released;
  Py_IncRef(&lane->head);
  Py_IncRef(block->memory);
  Py_IncRef(block->note_released);
  block->data = batch.data;
  block->length = batch.message.length;
  block->segment = batch.message.segment;
  block->offset = batch.message.offset;
  lane->current = block;
  ++lane->held;
  return block;
}

// Makes the object by which callables under `@batch` get a batch; null with an exception. If it fails, the lane keeps
// the block, so that dropping it sends no message: Python handles the packet, and gives the block back when it is done.
Requests* MakeRequests(Lane* lane, const Incoming& batch) {
  Block* block = MakeBlock(lane, batch);
  if (block == nullptr) return nullptr;
  return reinterpret_cast<Requests*>(MakeRequests(
      requests_type, lane->make_requests, &block->head, *batch.form, batch.record, batch.data, lane->metadata,
      batch.likeness));
}

PyObject* Call(Lane* lane, const Incoming& batch, Requests* requests) {
  if (lane->takes_columns) {
    return PyObject_CallFunctionObjArgs(
        lane->callable, requests->columns, batch.form->rows, &requests->head, nullptr);
  }
  PyObject* made = CallRequests(&requests->head, nullptr, nullptr);
  if (made == nullptr) return nullptr;
  PyObject* result = PyObject_CallFunctionObjArgs(lane->callable, made, nullptr);
  Py_DecRef(made);
  return result;
}

// ---- the answer to it -----------------------------------------------------------------------------------------------

// Finds a block for a record; null if none is free at once, or with an exception.
ReplyBlock* FindRoom(Lane* lane, uint64_t length) {
  if (lane->in_flight == 2) return nullptr;
  const int place = lane->in_flight == 0 ? lane->newest : 1 - lane->newest;
  ReplyBlock* reply = &lane->replies[place];
  if (reply->is_there && reply->capacity >= length) return reply;
  reply->is_there = false;
  PyObject* told = PyObject_CallFunction(lane->make_room, "iK", place, static_cast<unsigned long long>(length));
  if (told == nullptr) return nullptr;
  unsigned long long segment, offset, capacity, address;
  if (told != &_Py_NoneStruct && PyArg_ParseTuple(told, "KKKK", &segment, &offset, &capacity, &address)) {
    *reply = {true, static_cast<uint32_t>(segment), offset, capacity, reinterpret_cast<char*>(address)};
  }
  Py_DecRef(told);
  return reply->is_there ? reply : nullptr;
}

// Whether large outputs lie in memory from which Python can send them; true with an exception.
bool IsLent(Lane* lane, const Incoming& batch, const ReplyForm& form) {
  if (form.payload_bytes <= kSmallRecordBytes) return false;
  const char* first = form.found[0]->data;
  if (form.payload_bytes > kLargestCopiedBytes && first >= batch.data && first < batch.data + batch.message.length) return true;
  PyObject* told = PyObject_CallFunction(
      lane->is_lent, "K", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(first)));
  const bool is_lent = told == nullptr || PyLong_AsLongLong(told) != 0;
  Clear(told);
  return is_lent;
}

void WriteRecord(const ReplyForm& form, uint64_t number, char* record) {
  WriteMetadata(form, number, record);
  if (form.payload_bytes <= kSmallRecordBytes) {
    CopyPayloads(form, record);
    return;
  }
  PyThreadState* state = PyEval_SaveThread();
  CopyPayloads(form, record);
  PyEval_RestoreThread(state);
}

bool Send(Lane* lane, const Message& message) {
  // There is nearly always room at once, so the first try does not release the GIL.
  int flags = MSG_NOSIGNAL | MSG_DONTWAIT;
  for (;;) {
    PyThreadState* state = (flags & MSG_DONTWAIT) != 0 ? nullptr : PyEval_SaveThread();
    const ssize_t size = send(lane->fd, &message, sizeof(message), flags);
    const int saved = errno;
    if (state != nullptr) PyEval_RestoreThread(state);
    if (size >= 0) return true;
    if (saved == EINTR) {
      if (PyErr_CheckSignals() != 0) return false;
    } else if (saved == EAGAIN && (flags & MSG_DONTWAIT) != 0) {
      flags = MSG_NOSIGNAL;  // at most for the timeout of the socket
    } else {
      errno = saved;
      PyErr_SetFromErrno(PyExc_OSError);
      return false;
    }
  }
}

bool SendResponse(Lane* lane, const Incoming& batch, const ReplyBlock* reply, uint64_t length) {
  Message message{};
  message.type = static_cast<uint16_t>(MessageType::kResponse);
  message.flags = kFlagBatchDone;
  // If something still refers to the inputs, a later message names their block, when it is dropped.
  if (lane->current == nullptr) message.flags |= kFlagInputReleased;
  lane->current = nullptr;
  message.size = sizeof(Message);
  message.batch = batch.message.batch;
  message.segment = reply->segment;
  message.offset = reply->offset;
  message.length = length;
  // These are the blocks of other batches.
  const Py_ssize_t others = PyObject_Size(lane->released);
  if (others < 0) return false;
  if (others > 0) {
    PyObject* done = PyObject_CallFunctionObjArgs(lane->give_back, nullptr);
    if (done == nullptr) return false;
    Py_DecRef(done);
  }
  if (!Send(lane, message)) return false;
  if (lane->look_ns != 0) lane->answered_ns = Now();
  lane->newest = static_cast<int>(reply - lane->replies);
  lane->in_flight += 1;
  lane->sent += 1;
  return true;
}

// Serves a batch. kOther: Python goes on, with the packet if `called` is null, otherwise with the call in it.
Outcome Serve(Lane* lane, const Incoming& batch, PyObject** called) {
  Requests* requests = MakeRequests(lane, batch);
  if (requests == nullptr) {
    // The error is cleared because Python raises a better one than numpy.
    PyErr_Clear();
    return Outcome::kOther;
  }
  const uint64_t called_ns = Now();
  PyObject* result = Call(lane, batch, requests);
  const uint64_t spent_ns = Now() - called_ns;
  ReplyForm* form = result == nullptr ? nullptr : FormOf(batch.form, lane->lay_out, requests->raw, batch.likeness, result);
  const ReplyBlock* reply = nullptr;
  if (form != nullptr) {
    for (Py_ssize_t i = 0; i < form->piece_count; ++i) Py_IncRef(&form->found[i]->head);
    if (!IsLent(lane, batch, *form)) reply = FindRoom(lane, form->length);
    if (reply != nullptr && lane->is_open) WriteRecord(*form, batch.message.batch, reply->data);
    for (Py_ssize_t i = 0; i < form->piece_count; ++i) Py_DecRef(&form->found[i]->head);
  }
  if (!lane->is_open) {
    // This is a forked child in which the callable returned as well; the connection belongs to the parent.
    Clear(result);
    Py_DecRef(&requests->head);
    PyErr_Clear();
    errno = EBADF;
    PyErr_SetFromErrno(PyExc_OSError);
    return Outcome::kError;
  }
  if (reply != nullptr) {
    const uint64_t length = form->length;
    Count(lane->counts, *batch.form, batch.record, *form, called_ns, spent_ns);
    // No reference to the inputs may be left here when the response is sent.
    Clear(result);
    Py_DecRef(&requests->head);
    return SendResponse(lane, batch, reply, length) ? Outcome::kPlain : Outcome::kError;
  }
  PyObject* error = TakeError();
  if (error != nullptr) Clear(result);
  // From here on, whoever drops the block reports it.
  lane->current = nullptr;
  *called = WithParts(*requests, [&](auto... parts) {
    return Py_BuildValue(
        "[(IK)OOiOOKKKKNN]", static_cast<unsigned>(batch.message.segment),
        static_cast<unsigned long long>(batch.message.offset), parts..., static_cast<unsigned long long>(called_ns),
        result == nullptr ? NewNone() : result, error == nullptr ? NewNone() : error);
  });
  Py_DecRef(&requests->head);
  return *called == nullptr ? Outcome::kError : Outcome::kOther;
}

// ---- the loop -------------------------------------------------------------------------------------------------------

PyObject* TellPacket(ssize_t size, msghdr* header) {
  PyObject* fds = PyList_New(0);
  for (cmsghdr* part = header == nullptr ? nullptr : CMSG_FIRSTHDR(header); fds != nullptr && part != nullptr; part = CMSG_NXTHDR(header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      PyObject* number = PyLong_FromLong(fd);
      if (number == nullptr || PyList_Append(fds, number) != 0) Clear(fds);
      Clear(number);
      if (fds == nullptr) break;
    }
  }
  return fds == nullptr ? nullptr : Py_BuildValue("(nN)", static_cast<Py_ssize_t>(size), fds);
}

PyObject* Run(PyObject* self, PyObject* args) {
  auto* lane = reinterpret_cast<Lane*>(self);
  unsigned long long sent, pending;
  if (!PyArg_ParseTuple(args, "KK", &sent, &pending)) return nullptr;
  lane->sent = sent;
  lane->pending = pending;
  while (lane->is_open) {
    alignas(cmsghdr) char ancillary[CMSG_SPACE(4 * sizeof(int))];
    iovec piece{lane->packet, lane->packet_size};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = ancillary;
    header.msg_controllen = sizeof(ancillary);
    const ssize_t size = Receive(lane, &header);
    if (size < 0) {
      const int saved = errno;
      if (saved == EINTR) {
        if (PyErr_CheckSignals() != 0) return nullptr;
        continue;
      }
      if (saved == EAGAIN) return NewNone();
      // The proxy backend has closed the socket without reading some of our messages, which is an end like any other.
      if (saved == ECONNRESET) return TellPacket(0, nullptr);
      errno = saved;
      return PyErr_SetFromErrno(PyExc_OSError);
    }
    Incoming batch;
    Outcome outcome = Recognise(lane, size, header, &batch);
    PyObject* called = nullptr;
    if (outcome == Outcome::kPlain) outcome = Serve(lane, batch, &called);
    if (outcome == Outcome::kError) return nullptr;
    if (outcome == Outcome::kOther) return called != nullptr ? called : TellPacket(size, &header);
  }
  errno = EBADF;
  return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject* Leave(PyObject* self, PyObject*) {
  auto* lane = reinterpret_cast<Lane*>(self);
  PyObject* state = Py_BuildValue(
      "(KKi)", static_cast<unsigned long long>(lane->sent), static_cast<unsigned long long>(lane->in_flight),
      lane->newest);
  if (state == nullptr) return nullptr;
  lane->in_flight = 0;
  for (ReplyBlock& reply : lane->replies) reply.is_there = false;
  lane->current = nullptr;
  while (lane->segment_count > 0) Clear(lane->segments[--lane->segment_count].memory);
  return state;
}

// ---- the type -------------------------------------------------------------------------------------------------------

struct Method {
  const char* name;
  PyObject* Lane::*member;
};
constexpr Method kMethods[] = {
    {"describe", &Lane::describe},
    {"lay_out", &Lane::lay_out},
    {"make_room", &Lane::make_room},
    {"is_lent", &Lane::is_lent},
    {"acknowledge", &Lane::acknowledge},
    {"segment", &Lane::segment},
    {"make_requests", &Lane::make_requests},
    {"released", &Lane::released},
    {"note_released", &Lane::note_released},
    {"give_back", &Lane::give_back},
};

void Empty(Lane* lane) {
  lane->is_open = false;
  FreeForms(&lane->forms);
  while (lane->segment_count > 0) Clear(lane->segments[--lane->segment_count].memory);
  for (const Method& method : kMethods) Clear(lane->*method.member);
  Clear(lane->callable);
}

// (fd, buffer, (address of the counters, how many), their array, callable, whether it takes columns, how long the next
// batch is looked for, host)
int InitLane(PyObject* self, PyObject* args, PyObject*) {
  auto* lane = reinterpret_cast<Lane*>(self);
  PyObject *buffer, *counters, *callable, *host;
  unsigned long long address, look_ns;
  Py_ssize_t count;
  int fd, takes_columns;
  if (!PyArg_ParseTuple(
          args, "iO(Kn)OOiKO", &fd, &buffer, &address, &count, &counters, &callable, &takes_columns, &look_ns, &host)) {
    return -1;
  }
  if (lane->callable != nullptr) {
    PyErr_Format(PyExc_ValueError, "a lane is made once");
    return -1;
  }
  Counts* counts = CountsAt(address, count);
  if (counts == nullptr) return -1;
  char* packet = PyByteArray_AsString(buffer);
  lane->metadata = static_cast<char*>(malloc(kComparedBytes));
  if (packet == nullptr || lane->metadata == nullptr) return -1;
  for (const Method& method : kMethods) {
    lane->*method.member = PyObject_GetAttrString(host, method.name);
    if (lane->*method.member == nullptr) return -1;
  }
  Py_IncRef(buffer);
  Py_IncRef(counters);
  Py_IncRef(callable);
  lane->buffer = buffer;
  lane->counters = counters;
  lane->callable = callable;
  lane->fd = fd;
  lane->takes_columns = takes_columns != 0;
  lane->look_ns = look_ns;
  lane->next_rest = kShortestRest;
  lane->packet = packet;
  lane->packet_size = PyByteArray_Size(buffer);
  lane->counts = counts;
  lane->is_open = true;
  return 0;
}

// A lane does not take part in cyclic garbage collection: whoever made it closes it.
PyObject* Close(PyObject* self, PyObject*) {
  Empty(reinterpret_cast<Lane*>(self));
  return NewNone();
}

PyObject* Held(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(reinterpret_cast<Lane*>(self)->held);
}

PyObject* CloseInChild(PyObject* self, PyObject*) {
  // The callable that forked still runs inside `run`, which needs everything else.
  reinterpret_cast<Lane*>(self)->is_open = false;
  return NewNone();
}

void FreeLane(PyObject* self) {
  auto* lane = reinterpret_cast<Lane*>(self);
  Empty(lane);
  Clear(lane->buffer);
  Clear(lane->counters);
  free(lane->metadata);
  FreeObject(self);
}

PyMethodDef lane_methods[] = {
    {"run", Run, METH_VARARGS, nullptr},
    {"leave", Leave, METH_NOARGS, nullptr},
    {"held", Held, METH_NOARGS, nullptr},
    {"close", Close, METH_NOARGS, nullptr},
    {"close_in_child", CloseInChild, METH_NOARGS, nullptr},
    {},
};

}  // namespace

PyObject* MakeLaneType() {
  PyType_Slot block_slots[] = {{Py_tp_dealloc, Slot(FreeBlock)}, {Py_sq_item, Slot(BlockItem)}, {}};
  PyType_Slot requests_slots[] = {{Py_tp_dealloc, Slot(FreeRequests)}, {Py_tp_call, Slot(CallRequests)}, {}};
  PyType_Slot lane_slots[] = {
      {Py_tp_new, Slot(PyType_GenericNew)}, {Py_tp_init, Slot(InitLane)}, {Py_tp_dealloc, Slot(FreeLane)},
      {Py_tp_methods, lane_methods}, {},
  };
  constexpr unsigned int kInner = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  block_type = MakeType("pytriton.proxy_backend._accelerator.Block", sizeof(Block), kInner, block_slots);
  requests_type = MakeType("pytriton.proxy_backend._accelerator.Requests", sizeof(Requests), kInner, requests_slots);
  if (block_type == nullptr || requests_type == nullptr) return nullptr;
  return reinterpret_cast<PyObject*>(
      MakeType("pytriton.proxy_backend._accelerator.Lane", sizeof(Lane), Py_TPFLAGS_DEFAULT, lane_slots));
}

}  // namespace pytriton
