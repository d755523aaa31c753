// One worker: its socket, its two arenas and the batches that it has not answered yet.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "arena.h"
#include "batch.h"
#include "pace.h"
#include "packet.h"
#include "protocol.h"
#include "record.h"
#include "settings.h"
#include "triton_util.h"

namespace pytriton {

// What a greeting says about the model, and what errors name.
struct ModelIdentity {
  std::string name;
  uint64_t version = 0;
  uint64_t max_rows = 0;  // of a batch of several requests; 0 where Triton joins none

  // How errors and records of the log begin that are about the model.
  std::string Begin() const { return "model '" + name + "' version " + std::to_string(version) + ": "; }
};

// States: kGreeting -> kAttached -> kDetaching -> kClosed, and from each straight to kClosed.
//   kGreeting   the socket is accepted, HELLO has not come, nor ACTIVITY, whose answer ends it, nor CALLER, with which
//               another takes the socket over
//   kAttached   takes batches
//   kDetaching  the worker asked to leave: finishes what it has, gets nothing new
//   kClosed     shut down; every batch it had is answered. The descriptor lives as long as the object, so that its
//               number cannot come to mean another worker while somebody still holds this one
enum class ConnectionState { kGreeting, kAttached, kDetaching, kClosed };

// What an endpoint is at.
struct Activity {
  uint64_t in_flight;  // batches that are not answered
  uint64_t taken;      // batches that there have been
};

// What serves the connections over which workers call into the server.
class CallService {
 public:
  virtual ~CallService() = default;
  // Takes over the socket of a worker that has been welcomed.
  virtual void Serve(int fd, const std::string& label) = 0;
  // An error where a worker says that its model is not ready; `instance` names it there.
  virtual TRITONSERVER_Error* CheckReady(const std::string& instance) = 0;
};

// Whom a connection tells of its end. Called with the connection's mutex held: it must not call back.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  // A worker went that was not asked to; `what` names it and says why.
  virtual void WorkerLost(const std::string& what) = 0;
  // One that may answer otherwise than the others takes batches from now on, or no more.
  virtual void WorkersChanged() {}
  // A batch that another worker may have: the lost one has not begun with it, or not to answer it.
  virtual void TakeBack(std::unique_ptr<Batch> batch) = 0;
  // How long a worker was at a batch whose cost is counted.
  virtual void Took(uint64_t, uint64_t) {}
  virtual Activity GetActivity() const = 0;
  // Null where workers cannot call into the server.
  virtual CallService* calls() const { return nullptr; }
  // An event at which it has each connection do what is due.
  virtual int wake_fd() const { return -1; }
};

class Connection {
 public:
  // Takes over `fd`, a connected SOCK_SEQPACKET socket, non-blocking. The process that has connected it must last as
  // long as the connection: others may hold the socket, as a child that it has forked.
  Connection(int fd, const ModelIdentity& model, const Settings& settings, ConnectionOwner* owner);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_; }
  // Readable from the end of the worker's process on; -1 where the system cannot watch it.
  int process_fd() const { return process_fd_; }
  uint64_t accepted_ns() const { return accepted_ns_; }
  ConnectionState state() const { return state_.load(std::memory_order_acquire); }
  // Batches claimed for this worker and not finished.
  uint32_t load() const { return load_.load(std::memory_order_acquire); }
  bool idle() const {
    return state() == ConnectionState::kAttached && load() < max_in_flight_ && !silent_ && !executing();
  }
  // Whether it takes batches only to say why nobody serves them.
  bool stands_in() const { return stands_in_; }
  // Whether it takes batches. One that is asleep takes none: it holds the place of a worker that `Wake` starts.
  bool takes_batches() const { return state() == ConnectionState::kAttached && !asleep_; }
  bool is_asleep() const { return state() == ConnectionState::kAttached && asleep_; }
  // Whether it is asleep and was not told to wake.
  bool can_wake() const { return is_asleep() && !woken_.load(std::memory_order_acquire); }
  // Tells one that is asleep, once, that a batch waits.
  void Wake();
  // Whether the worker is at a batch that it may have answered already, and takes no other one meanwhile.
  bool executing() const { return executing_.load(std::memory_order_acquire) != 0; }
  // Makes place for one more batch. False where it has as many as it takes.
  bool Claim();
  // When the worker is nearly done with the batch that it is at, so that the next may be sent ahead; kNever where nobody
  // can tell, or it takes none ahead.
  uint64_t nearly_done_ns() const { return nearly_done_ns_.load(std::memory_order_acquire); }
  // Whether a batch may be sent ahead now.
  bool takes_ahead() const {
    const uint64_t since_ns = nearly_done_ns();
    return since_ns != kNever && load() == 1 && state() == ConnectionState::kAttached && NowNs() >= since_ns;
  }
  // Makes place for a batch sent ahead. False where it takes none now.
  bool ClaimAhead();
  const std::string& label() const { return label_; }

  // Reads and handles the messages that are there, as far as its turn goes: what is left makes the socket readable
  // again. Anything wrong closes the connection with a logged reason.
  void Process();

  // Closes the connection, since the worker's process has ended. What that has sent comes first.
  void ProcessEnded();

  enum class SendResult { kSent, kAnswered, kRefused, kFailed, kBusy, kUnread, kClosed };
  // Hands a batch to the worker, which has been claimed before. kSent: the connection owns it now. kAnswered: none
  // of its requests could be read, each has its error. kRefused: it can never fit; `error` says why. kFailed: the system has no memory or descriptor for it; `error` likewise. kBusy: no
  // room until the worker gives some back. kUnread: no room until it reads what it was sent, as one that is busy with
  // something else will. kClosed: the worker is gone.
  // In every case but kSent the claim is given back and `batch` stays with the caller.
  SendResult Send(std::unique_ptr<Batch>* batch, BatchSource* scratch, std::string* error);

  // Whether its socket takes one more message, so that nobody waits for it. Asked of the system only where there may be
  // many that the worker has not read.
  bool has_room() const;

  // What is due without a message: cancellations of requests in flight, batches whose time is over, memory that nobody
  // used for a while.
  void Tick(uint64_t now_ns);

  // Calls `use` with a request of a batch in flight, which lasts as long as that takes. False where there is none.
  bool UseRequest(uint64_t batch, uint32_t index, const std::function<void(TRITONBACKEND_Request*)>& use);

  // Closes the connection and fails what is in flight.
  void Close(const std::string& reason, bool expected);

 private:
  void ProcessLocked();
  void CloseLocked(const std::string& reason, bool expected);
  bool HandleLocked(const Packet& packet, std::string* error);
  bool IsForThisModel(const std::string& text, uint64_t version, std::string* error) const;
  bool IsSameUser(ucred* peer, std::string* error) const;
  void ActivityLocked(std::string* error);
  bool HelloLocked(MessageType type, const uint8_t* body, uint32_t body_length, std::string* error);
  // Welcomes one that is asleep.
  bool AttachAsleepLocked(const std::string& version);
  // Lets the socket go to whoever serves calls; its end here.
  void HandOverLocked();
  bool ResponseLocked(const Message& message, std::string* error);
  bool FailLocked(const Message& message, const uint8_t* body, uint32_t body_length, std::string* error);
  bool ReleaseLocked(const Message& message, std::string* error);
  bool PollCancelledLocked(uint64_t now_ns, std::string* error);
  bool ExpireLocked(uint64_t now_ns, std::string* error);
  // Tells the worker which streams are to pause, of one batch; ends those that do so for too long.
  void PaceLocked(Batch* batch, uint64_t now_ns, std::string* error);
  bool EndStalledLocked(uint64_t now_ns, std::string* error);
  // Whether nothing is left to tell the worker.
  bool SendCancelLocked(Batch* batch, uint32_t request, std::string* error);
  void BatchDoneLocked(uint64_t batch, uint16_t flags);
  // The worker is at this batch from now on.
  void BeginLocked(const Batch& batch);
  // Whether the answer to the batch that the worker was at has come, and was not read. After the socket was shut down.
  bool HasAnsweredLocked();
  // Sends one packet without waiting, as `SendPacket`.
  Sent SendLocked(Message* message, const void* body, size_t body_length, int fd, std::string* error);
  bool ExecutedLocked(const Message& message, std::string* error);
  void ReleaseInputLocked(Batch* batch);
  bool AddSegmentLocked(uint64_t length, std::string* error);
  bool SendSegmentLocked(Segment* segment, std::string* error);
  // Finds room for a record, kSent where there is some; adds or closes segments for it.
  SendResult AllocateLocked(uint64_t length, Block* block, std::string* error);
  bool SendGreetingLocked(MessageType type, const std::string& text);
  bool WriteLocked(Message* message, const void* body, size_t body_length, int fd, std::string* error);
  // Sends what may be left out, where the socket has room: a busy worker reads nothing, and is not to be waited for.
  bool TryWriteLocked(Message* message, bool* sent, std::string* error);
  bool AcknowledgeLocked(std::string* error);
  bool IsAcknowledgedLater(uint64_t length);

  const int fd_;
  const int process_fd_;
  const ModelIdentity& model_;
  const Settings& settings_;
  ConnectionOwner* const owner_;
  const uint64_t accepted_ns_;
  std::atomic<ConnectionState> state_{ConnectionState::kGreeting};
  std::atomic<uint32_t> load_{0};
  std::atomic<uint32_t> max_in_flight_{1};
  // Whether nothing came since a batch expired. Such a worker gets no more, and is given up if that goes on.
  std::atomic<bool> silent_{false};
  // The batch that the worker is at, kClaimed while it is about to get one, 0 while it can take one. Always 0 of a worker
  // that does not say so.
  static constexpr uint64_t kClaimed = UINT64_MAX;
  std::atomic<uint64_t> executing_{0};
  bool says_executed_ = false;  // set before it is attached, as the next two, and has_ahead_
  bool stands_in_ = false;
  bool asleep_ = false;
  std::atomic<bool> woken_{false};
  bool has_ahead_ = false;      // it takes a batch ahead
  std::atomic<uint64_t> nearly_done_ns_{kNever};

  std::mutex mutex_;  // guards everything below
  std::string label_;
  uint64_t capabilities_ = 0;
  Arena inputs_;       // ours: the worker reads it
  PeerArena outputs_;  // the worker's
  std::map<uint64_t, std::unique_ptr<Batch>> in_flight_;
  std::map<uint64_t, std::unique_ptr<Batch>>::node_type spare_;  // the memory of the last place in it, for the next
  uint64_t consumed_ = 0;      // RESPONSE messages read
  uint64_t acknowledged_ = 0;  // of these, those that the worker has been told of
  uint64_t unacknowledged_bytes_ = 0;  // of the others, where the model is decoupled
  bool acknowledgement_due_ = false;  // the socket had no room for it
  uint64_t silent_since_ns_ = 0;
  Pace pace_;                // of full batches, where it takes one ahead
  uint64_t last_sent_ = 0;   // the batch of the last message to it, 0 where that was no BATCH
  bool was_reset_ = false;   // it has closed, and has not read that message
  ResponseRecord record_;
};

}  // namespace pytriton
