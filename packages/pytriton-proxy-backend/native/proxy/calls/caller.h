// The connection over which one worker makes its calls. It reads a call, lets a service carry it out (inference.h,
// models.h, metrics.h), and sends the answers.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "../link/packet.h"
#include "../text/errno_text.h"
#include "../wire/arena.h"
#include "../wire/record.h"
#include "call.h"
#include "calls.h"
#include "failure.h"
#include "inference.h"
#include "metrics.h"

namespace pytriton {

// One thread reads the calls. The thread in which an answer comes sends it if the socket and the arena have room;
// otherwise the reading thread sends it once they have.
class Caller : public std::enable_shared_from_this<Caller> {
 public:
  Caller(int fd, std::string label, std::shared_ptr<const CallContext> context)
      : fd_(fd),
        process_fd_(ProcessOf(fd)),
        wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        label_(std::move(label)),
        context_(std::move(context)),
        requests_(context_->arena_budget_bytes),
        responses_(context_->arena_budget_bytes) {}
  ~Caller() {
    for (const int fd : {fd_, process_fd_, wake_fd_}) {
      if (fd >= 0) close(fd);
    }
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  void Start() {
    if (wake_fd_ < 0) throw std::runtime_error(Errno("eventfd"));
    thread_ = std::thread([self = shared_from_this()] { self->Run(); });
  }
  // Ends the connection, and waits for its thread.
  void Stop() {
    Close("the model is unloaded", false);
    if (thread_.joinable()) thread_.join();
  }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

  // Triton's threads call this with a response of a call, which may be null, and at the end of its request.
  void Respond(const CallRef& call, Response response, bool final);
  void Released(const CallRef& call);
  // Ends a call that waits for a question by sending the number of the question.
  void Ask(const CallRef& call, uint64_t question) {
    std::lock_guard<std::mutex> lock(mutex_);
    Finish(call, {}, question);
  }

 private:
  struct Answer {
    Response response;
    bool final;
  };
  // The answers of a call that wait for room in the arena or the socket, and how long the first of them has waited.
  struct Waiting {
    CallRef call;
    std::deque<Answer> answers;
    uint64_t since_ns;
  };
  // A packet that waits for room in the socket.
  struct Outgoing {
    Message message;
    std::string body;
    int fd;
  };

  // The reading thread: runs `Serve` until the connection ends, then ends everything that it has made.
  void Run();
  std::string Serve();
  bool Read(std::string* error);
  void Tick(uint64_t now_ns);
  void Close(const std::string& reason, bool broken);
  void Wake();

  // Each handles a packet of the worker and returns false with the reason if the connection must end.
  bool Handle(const Packet& packet, std::string* error);
  bool HandleCall(const Packet& packet, std::string* error);
  bool HandleRelease(const Message& message, std::string* error);
  void HandleCancel(const Message& message);

  // The steps of a call: read its body, register it, read its record, let a service carry it out.
  struct Incoming {
    Operation operation;
    CallBody body;
    std::string name;
    std::shared_ptr<CallRecord> record = std::make_shared<CallRecord>();
  };
  CallRef BeginCall(const Message& message, std::string* error);
  Failure ReadRecord(const CallRef& call, const Message& message, Incoming* in);
  // What a service returns at once; empty if the service answers later.
  struct Outcome {
    Failure failure;
    uint64_t value = 0;
    bool is_later = false;
  };
  Outcome Do(const CallRef& call, const Incoming& in);
  Outcome StartControl(const CallRef& call, const Incoming& in);

  // The functions below are called with the mutex held.
  void Finish(const CallRef& call, const Failure& failure, uint64_t value);
  bool TryAnswer(const CallRef& call, const Answer& answer);
  bool Fail(const CallRef& call, const Failure& failure, bool final);
  bool SendRecord(const CallRef& call, const ResponseSource& source, bool final);
  bool Allocate(uint64_t length, Block* block, Failure* failure);
  uint16_t Flags(const CallRef& call, bool final);
  void AnswerWaiting();
  // Ends a call whose answers have waited too long for room.
  void GiveUp(const CallRef& call);
  void Post(Message message, std::string body = "", int fd = -1);
  void Flush();
  void CloseLocked(const std::string& reason, bool broken);

  const int fd_;
  const int process_fd_;
  const int wake_fd_;
  const std::string label_;
  const std::shared_ptr<const CallContext> context_;
  std::thread thread_;
  std::atomic<bool> ended_{false};

  CallMetrics metrics_;  // used by the reading thread alone

  std::mutex mutex_;
  bool closed_ = false;
  PeerArena requests_;  // the worker's
  Arena responses_;     // ours
  std::map<uint64_t, CallRef> calls_;
  std::map<uint64_t, Waiting> waiting_;  // by the numbers of the calls
  std::deque<Outgoing> outbox_;
  bool is_blocked_ = false;  // the socket has no room for the first packet that waits
  int controls_ = 0;
};

}  // namespace pytriton
