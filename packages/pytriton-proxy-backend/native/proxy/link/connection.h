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

#include "../batch/batch.h"
#include "../triton/triton_util.h"
#include "../wire/arena.h"
#include "../wire/protocol.h"
#include "../wire/record.h"
#include "../wire/settings.h"
#include "pace.h"
#include "packet.h"

namespace pytriton {

// What a greeting and errors say about the model.
struct ModelIdentity {
  std::string name;
  uint64_t version = 0;
  uint64_t max_rows = 0;  // the most rows in a batch of several requests; 0 if Triton joins none

  // The beginning of errors and log records about the model.
  std::string Begin() const { return "model '" + name + "' version " + std::to_string(version) + ": "; }
};

// States: kGreeting -> kAttached -> kDetaching -> kClosed; kClosed may follow any of them.
// kGreeting: the socket is accepted, and HELLO has not come. ACTIVITY in its place is answered and ends the connection;
// CALLER hands the socket to the call service.
// kAttached: the worker takes batches.
// kDetaching: the worker asked to leave. It finishes the batches that it has, and gets no more.
// kClosed: the socket is shut down, and every batch was answered. The descriptor stays open as long as the object
// lives, so that its number cannot mean another worker while somebody holds this object.
enum class ConnectionState { kGreeting, kAttached, kDetaching, kClosed };

// How busy an endpoint is.
struct Activity {
  uint64_t in_flight;  // batches without an answer
  uint64_t taken;      // all batches so far
};

// Serves the connections over which workers call the server.
class CallService {
 public:
  virtual ~CallService() = default;
  // Takes over the socket of a worker that was welcomed.
  virtual void Serve(int fd, const std::string& label) = 0;
  // Returns an error if a worker reports that its model is not ready. The error names `instance`.
  virtual TRITONSERVER_Error* CheckReady(const std::string& instance) = 0;
};

// Is told by its connections of what happens to them, with the connection's mutex held: it must not call back.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  // A worker has gone without being asked to. `what` names it and the reason.
  virtual void WorkerLost(const std::string& what) = 0;
  // A worker that takes batches has come or gone, so the answers to the same requests may differ from now on.
  virtual void WorkersChanged() {}
  // Takes a batch of a lost worker that another one may serve: the lost one had not begun with it, or the model allows
  // repeats.
  virtual void TakeBack(std::unique_ptr<Batch> batch) = 0;
  // Notes how long a worker took for a batch whose cost is counted.
  virtual void Took(uint64_t, uint64_t) {}
  virtual Activity GetActivity() const = 0;
  // Returns null if workers cannot call the server.
  virtual CallService* calls() const { return nullptr; }
  // Returns an event; once it is signalled, the owner calls `Tick` of each connection.
  virtual int wake_fd() const { return -1; }
};

class Connection {
 public:
  // Takes over `fd`, a connected, non-blocking SOCK_SEQPACKET socket. The process that connected it must live as long
  // as the connection; its end ends the connection even if another process, such as a forked child, still has the
  // socket.
  Connection(int fd, const ModelIdentity& model, const Settings& settings, ConnectionOwner* owner);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_; }
  // Becomes readable when the worker's process ends; -1 if the system cannot watch it.
  int process_fd() const { return process_fd_; }
  uint64_t accepted_ns() const { return accepted_ns_; }
  ConnectionState state() const { return state_.load(std::memory_order_acquire); }
  // The number of batches that are claimed for this worker and not finished.
  uint32_t load() const { return load_.load(std::memory_order_acquire); }
  bool idle() const {
    return state() == ConnectionState::kAttached && load() < max_in_flight_ && !silent_ && !executing();
  }
  // Whether this worker takes batches only to answer them with the reason why there is no other worker.
  bool stands_in() const { return stands_in_; }
  // Whether the worker takes batches. One that is asleep does not: it keeps the place of a worker that `Wake` has
  // started.
  bool takes_batches() const { return state() == ConnectionState::kAttached && !asleep_; }
  bool is_asleep() const { return state() == ConnectionState::kAttached && asleep_; }
  // Whether it is asleep and has not been told to wake.
  bool can_wake() const { return is_asleep() && !woken_.load(std::memory_order_acquire); }
  // Tells a worker that is asleep, once, that a batch waits.
  void Wake();
  // Whether the worker is still busy with a batch, which it may have answered already, and takes no other one
  // meanwhile.
  bool executing() const { return executing_.load(std::memory_order_acquire) != 0; }
  // Counts one more batch for this worker. Returns false if it has as many as it takes.
  bool Claim();
  // When the worker will be nearly done with its batch, so that the next may be sent ahead; kNever if that is unknown,
  // or if the worker takes no batch ahead.
  uint64_t nearly_done_ns() const { return nearly_done_ns_.load(std::memory_order_acquire); }
  // Whether a batch may be sent ahead now.
  bool takes_ahead() const {
    const uint64_t since_ns = nearly_done_ns();
    return since_ns != kNever && load() == 1 && state() == ConnectionState::kAttached && NowNs() >= since_ns &&
           !has_unread();
  }
  // Counts a batch that is to be sent ahead. Returns false if the worker takes none now.
  bool ClaimAhead();
  const std::string& label() const { return label_; }

  // Reads and handles messages until there are no more or the worker's turn is over; unread ones keep the socket
  // readable. Any error closes the connection and is logged.
  void Process();

  // Closes the connection because the worker's process has ended, after reading what it had sent.
  void ProcessEnded();

  enum class SendResult { kSent, kAnswered, kRefused, kFailed, kBusy, kUnread, kClosed };
  // Sends a batch to the worker, which was claimed before. kSent: the connection owns the batch now. kAnswered: no
  // request could be read, and each was answered with its error. kRefused: the batch can never fit, and `error` says
  // why. kFailed: the system lacks memory or descriptors for it, see `error`. kBusy: there is no room until the worker
  // releases blocks. kUnread: there is no room until the worker reads its socket. kClosed: the worker is gone. In all
  // cases but kSent the claim is given back and the caller keeps `batch`.
  SendResult Send(std::unique_ptr<Batch>* batch, BatchSource* scratch, std::string* error);

  // Whether the socket takes one more message without waiting. The system is asked only if the worker may have many
  // unread messages.
  bool has_room() const;
  // Whether the worker has not read all that it was sent. If it is lost, only the last message is known for certain to
  // be unread; so nothing follows an unread batch where that can wait, because the batch would count as begun.
  bool has_unread() const;

  // Does what time makes due: sends cancellations, ends batches that took too long, and gives unused memory back.
  void Tick(uint64_t now_ns);

  // Calls `use` with a request of a batch in flight and keeps the request alive meanwhile. Returns false if there is no
  // such request.
  bool UseRequest(uint64_t batch, uint32_t index, const std::function<void(TRITONBACKEND_Request*)>& use);

  // Closes the connection and fails the batches in flight.
  void Close(const std::string& reason, bool expected);

 private:
  void ProcessLocked();
  void CloseLocked(const std::string& reason, bool expected);
  bool HandleLocked(const Packet& packet, std::string* error);
  bool IsForThisModel(const std::string& text, uint64_t version, std::string* error) const;
  bool IsSameUser(ucred* peer, std::string* error) const;
  void ActivityLocked(std::string* error);
  bool HelloLocked(MessageType type, const uint8_t* body, uint32_t body_length, std::string* error);
  // Welcomes a worker that is asleep.
  bool AttachAsleepLocked(const std::string& version);
  // Hands the socket to the call service and ends this connection.
  void HandOverLocked();
  bool ResponseLocked(const Message& message, std::string* error);
  bool ResponsesLocked(const Message& message, std::string* error);
  bool RespondLocked(Batch* batch, const uint8_t* record, uint64_t length, std::string* error);
  bool FailLocked(const Message& message, const uint8_t* body, uint32_t body_length, std::string* error);
  bool ReleaseLocked(const Message& message, std::string* error);
  bool PollCancelledLocked(uint64_t now_ns, std::string* error);
  bool ExpireLocked(uint64_t now_ns, std::string* error);
  // Tells the worker which streams of a batch are to pause, and ends those that have paused for too long.
  void PaceLocked(Batch* batch, uint64_t now_ns, std::string* error);
  bool EndStalledLocked(uint64_t now_ns, std::string* error);
  // Returns true if the worker was told of the cancellation, or need not be told.
  bool SendCancelLocked(Batch* batch, uint32_t request, std::string* error);
  void BatchDoneLocked(uint64_t batch, uint16_t flags);
  // Notes that the worker works on this batch from now on.
  void BeginLocked(const Batch& batch);
  // Whether an unread message answers the worker's batch. To be called after the socket was shut down.
  bool HasAnsweredLocked();
  // Sends one packet without waiting, see `SendPacket`.
  Sent SendLocked(Message* message, const void* body, size_t body_length, int fd, std::string* error);
  bool ExecutedLocked(const Message& message, std::string* error);
  void ReleaseInputLocked(Batch* batch);
  bool AddSegmentLocked(uint64_t length, std::string* error);
  bool SendSegmentLocked(Segment* segment, std::string* error);
  // Allocates a block for a record, and adds or removes segments for that. Returns kSent on success.
  SendResult AllocateLocked(uint64_t length, Block* block, std::string* error);
  bool SendGreetingLocked(MessageType type, const std::string& text);
  bool WriteLocked(Message* message, const void* body, size_t body_length, int fd, std::string* error);
  // Sends a message that may be left out, if the socket has room. It does not wait, because a busy worker reads
  // nothing.
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
  // Whether nothing has come from the worker since a batch of it took too long. It gets no more batches then, and is
  // disconnected if this goes on.
  std::atomic<bool> silent_{false};
  // The number of the worker's batch; kClaimed shortly before it gets one; 0 if it can take one. Always 0 if the worker
  // does not send EXECUTED.
  static constexpr uint64_t kClaimed = UINT64_MAX;
  std::atomic<uint64_t> executing_{0};
  bool says_executed_ = false;  // this, the next two and has_ahead_ are set before the worker is attached
  bool stands_in_ = false;
  bool asleep_ = false;
  std::atomic<bool> woken_{false};
  bool has_ahead_ = false;      // it takes a batch ahead
  std::atomic<uint64_t> nearly_done_ns_{kNever};

  std::mutex mutex_;  // guards everything below
  std::string label_;
  uint64_t capabilities_ = 0;
  Arena inputs_;       // owned by this side, read by the worker
  PeerArena outputs_;  // owned by the worker
  std::map<uint64_t, std::unique_ptr<Batch>> in_flight_;
  // the map node of a finished batch, used again for the next
  std::map<uint64_t, std::unique_ptr<Batch>>::node_type spare_;
  uint64_t consumed_ = 0;      // how many RESPONSE messages were read
  uint64_t acknowledged_ = 0;  // how many of them the worker was told of
  uint64_t unacknowledged_bytes_ = 0;  // bytes of the other ones, if the model is decoupled
  bool acknowledgement_due_ = false;  // the last acknowledgement found no room in the socket
  uint64_t silent_since_ns_ = 0;
  Pace pace_;                // how long full batches take, if the worker takes one ahead
  uint64_t last_sent_ = 0;   // the batch of the last message to the worker, 0 if that was no BATCH
  bool was_reset_ = false;   // the worker has closed the socket without reading that message
  ResponseRecord record_;
};

}  // namespace pytriton
