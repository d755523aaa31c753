// The HTTP connections that the server has accepted, by descriptor, and what each of them asks of the server.
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

// One connection. All of it belongs to the server's thread that reads it, but what is said otherwise.
struct Connection {
  HttpScan scan;
  uint64_t charged = 0;           // of the memory in flight
  uint64_t awaiting = 0;          // of the bytes of requests that wait for their response
  bool is_pipelined = false;      // a request began before the one in front of it was answered
  bool is_refused = false;        // what comes is read and thrown away
  bool is_left_alone = false;     // what comes is not looked at: only where nothing is refused
  bool is_out_of_step = false;    // an answer came that no request is known for: what is behind it is not held back
  bool is_paused = false;         // it has sent more than is read before the answer
  // What was read and not given to the server: see refuse/held_back.h.
  std::string held;
  bool is_held_cut = false;       // these bytes are a part of a first line
  bool has_ended_one = false;     // a request was whole in what was read last: the head behind it is another one
  bool has_more_time = false;     // for a head whose rest came while the server was busy
  time_t refused_at = 0;
  uint64_t drained_bytes = 0;
  // Whether a request is complete whose response was not begun.
  bool awaits_response() const { return !unanswered.empty(); }
  // Whether the answer to a request that the server has is not written to its end. False where that is not known.
  bool is_being_answered() const {
    return !is_out_of_step && !answers.is_lost() && (awaits_response() || !answers.is_at_begin());
  }
  // Such requests, in their order, null for those that are not for inference; and that whose response is a stream.
  std::vector<std::shared_ptr<RequestOutcome>> unanswered;
  std::shared_ptr<RequestOutcome> streamed;
  HttpAnswers answers;  // what was written
  std::unique_ptr<HttpResponse> corrected;  // the response that is being written, where it is not as it should be
  // For gRPC. Its front end reads and writes a connection in different threads: whoever uses anything but `received` holds
  // the lock for writing.
  Http2Frames sent;
  Http2Frames received{kHttp2Preface};
  size_t goodbye_bytes = 0;  // of GOAWAY, that were sent
};

// When the head of a request that a connection sends began, in milliseconds, and which thread waits for its end; 0: none is.
struct HeadMark {
  std::atomic<uint64_t> began;
  std::atomic<const void*> thread;
};

// One connection, and never another one that has its descriptor later.
struct ConnectionName {
  int fd = -1;
  uint32_t generation = 0;  // how many connections had the descriptor before
};

// The connections by descriptor. An entry is made when a socket is accepted and gone when it is closed; the objects are
// kept for the next connection with the same number, so a pointer to one never dangles.
class Connections {
 public:
  // Reserves room for all descriptors that the process may have; false where the system refuses.
  bool Reserve();
  void OnAccept(int fd);
  // Counts a connection among those of a thread until it is closed.
  void Assign(int fd, ThreadLoad* thread);
  // The connection of a descriptor that was accepted; null for any other.
  Connection* Find(int fd);
  // As Find, only where something was read from it.
  Connection* FindKnown(int fd);
  // What is wanted of a connection that was accepted; null for any other descriptor.
  Interest* FindInterest(int fd);
  // The mark of a head, of a descriptor of any kind; null where there is none.
  HeadMark* FindHead(int fd) {
    Slot* slot = SlotOf(fd);
    return slot == nullptr ? nullptr : &slot->head;
  }
  // The name of a connection that was accepted; of any other descriptor one that stands for none.
  ConnectionName NameOf(int fd);
  // The descriptor of a connection as long as that is not closed; else -1.
  int DescriptorOf(ConnectionName name);
  // The request that was made of a connection last; null where it was taken before.
  void SetRequest(int fd, const TRITONSERVER_InferenceRequest* request);
  const TRITONSERVER_InferenceRequest* TakeRequest(int fd);
  // Forgets a descriptor that is about to be closed, and returns what was known of it.
  Connection* Remove(int fd);

 private:
  enum Mark : uint8_t { kNone, kFresh, kKnown };
  struct Slot {
    std::atomic<uint8_t> mark;
    std::atomic<uint32_t> generation;
    std::atomic<Connection*> connection;
    std::atomic<ThreadLoad*> thread;  // that it is counted for, or null
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
