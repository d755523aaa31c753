// The HTTP connections that the server has accepted, by their descriptors, and what each of them asks of the server.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "handover/http2_frames.h"
#include "answers/http_answers.h"
#include "frontend/http_poll.h"
#include "answers/http_response.h"
#include "refuse/http_scan.h"
#include "frontend/http_threads.h"
#include "answers/outcomes.h"

struct TRITONSERVER_InferenceRequest;

namespace pytriton::guard {

constexpr size_t kHttp2Preface = 24;

// One connection. Only the server's thread that reads it uses this, except where something else is said.
struct Connection {
  HttpScan scan;
  uint64_t charged = 0;           // its share of the memory in flight
  uint64_t awaiting = 0;          // its share of the bytes of requests that wait for responses
  bool is_pipelined = false;      // a request began before the one in front of it was answered
  bool is_refused = false;        // everything that comes is read and dropped
  bool is_left_alone = false;     // what comes is not examined; only if nothing is refused
  bool is_out_of_step = false;    // an answer came without a known request, so what follows is not held back
  bool is_paused = false;         // the caller has sent more than is read before the answer
  // Bytes that were read and not given to the server: see refuse/held_back.h.
  std::string held;
  bool is_held_cut = false;       // these bytes are part of a first line
  bool has_ended_one = false;     // a request became complete in the last read, so the head after it is another one
  bool has_more_time = false;     // for a head whose rest came while the server was busy
  time_t refused_at = 0;
  uint64_t drained_bytes = 0;
  // Whether a request is complete and its response has not begun.
  bool awaits_response() const { return !unanswered.empty(); }
  // Whether the answer to a request in the server is not completely written. False if that is unknown.
  bool is_being_answered() const {
    return !is_out_of_step && !answers.is_lost() && (awaits_response() || !answers.is_at_begin());
  }
  // These requests in order, null for those that are not for inference; and the one whose response is a stream.
  std::vector<std::shared_ptr<RequestOutcome>> unanswered;
  std::shared_ptr<RequestOutcome> streamed;
  HttpAnswers answers;  // what was written
  std::unique_ptr<HttpResponse> corrected;  // the response that is being written, if it must be corrected
  // For gRPC, whose front end reads and writes a connection in different threads. Everything but `received` needs the
  // lock for writing.
  Http2Frames sent;
  Http2Frames received{kHttp2Preface};
  size_t goodbye_bytes = 0;  // how many bytes of GOAWAY were sent
};

// When a connection began to send the head of a request, in milliseconds, and which thread waits for its end; 0 if none
// does.
struct HeadMark {
  std::atomic<uint64_t> began;
  std::atomic<const void*> thread;
};

// Names one connection, and not a later one with the same descriptor.
struct ConnectionName {
  int fd = -1;
  uint32_t generation = 0;  // how many connections had this descriptor before
};

// The connections by descriptor. An entry is made when a socket is accepted and ends when it is closed. The objects are
// kept for the next connection with the same number, so a pointer to one always stays valid.
class Connections {
 public:
  // Reserves room for all descriptors that the process may have; false if the system refuses.
  bool Reserve();
  void OnAccept(int fd);
  // Counts a connection among those of a thread until it is closed.
  void Assign(int fd, ThreadLoad* thread);
  // Returns the connection of a descriptor that was accepted; null for any other one.
  Connection* Find(int fd);
  // Like Find, but only if something was read from the connection.
  Connection* FindKnown(int fd);
  // Returns what the front end wants of a connection that was accepted; null for any other descriptor.
  Interest* FindInterest(int fd);
  // Returns the mark of a head for a descriptor of any kind; null if there is none.
  HeadMark* FindHead(int fd) {
    Slot* slot = SlotOf(fd);
    return slot == nullptr ? nullptr : &slot->head;
  }
  // Returns the name of a connection that was accepted; for any other descriptor a name that stands for none.
  ConnectionName NameOf(int fd);
  // Returns the descriptor of a connection until it is closed; then -1.
  int DescriptorOf(ConnectionName name);
  // Sets the request that the connection made last. `TakeRequest` returns it once.
  void SetRequest(int fd, const TRITONSERVER_InferenceRequest* request);
  const TRITONSERVER_InferenceRequest* TakeRequest(int fd);
  // Forgets a descriptor that is about to be closed, and returns its connection.
  Connection* Remove(int fd);

 private:
  enum Mark : uint8_t { kNone, kFresh, kKnown };
  struct Slot {
    std::atomic<uint8_t> mark;
    std::atomic<uint32_t> generation;
    std::atomic<Connection*> connection;
    std::atomic<ThreadLoad*> thread;  // the thread that it is counted for, or null
    std::atomic<const TRITONSERVER_InferenceRequest*> request;
    Interest interest;
    HeadMark head;
  };
  Slot* SlotOf(int fd) {
    return fd >= 0 && static_cast<size_t>(fd) < count_ ? &slots_[fd] : nullptr;
  }

  Slot* slots_ = nullptr;
  size_t count_ = 0;
};

}  // namespace pytriton::guard
