#include "connection.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "../text/errno_text.h"
#include "../triton/triton_util.h"

namespace pytriton {

namespace {

// Limits of the responses of a stream that are not acknowledged yet: how many, and which share of the arena's budget
// (one part in so many).
constexpr uint64_t kMostUnacknowledged = 16;
constexpr uint64_t kPartsOfBudget = 8;
// How long the messages of one worker are read before those of the next.
constexpr uint64_t kTurnNs = 2 * 1000 * 1000;

// Tells whether another request of the last one's size would exceed the model's largest batch.
bool IsFull(const BatchSource& batch, uint64_t max_rows) {
  uint64_t rows = batch.requests.back().rows;
  for (const auto& request : batch.requests) rows += request.rows;
  return rows > max_rows;
}

std::string VersionText(uint16_t major, uint16_t minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

constexpr uint64_t kCancelPollNs = 20 * 1000 * 1000;
// The most times that a batch goes to another worker because the one before was lost without having begun with it.
constexpr uint32_t kMostReturns = 3;

// Every system's sockets have room for so many messages, so no more than this need a question to the system.
constexpr uint32_t kMostUnread = 32;

}  // namespace

Connection::Connection(int fd, const ModelIdentity& model, const Settings& settings, ConnectionOwner* owner)
    : fd_(fd),
      process_fd_(ProcessOf(fd)),
      model_(model),
      settings_(settings),
      owner_(owner),
      accepted_ns_(NowNs()),
      inputs_(settings.arena_budget_bytes),
      outputs_(settings.arena_budget_bytes) {
  label_ = "a peer that has not said its name";
}

Connection::~Connection() {
  Close("the model is unloaded", true);
  close(fd_);
  if (process_fd_ >= 0) close(process_fd_);
}

bool Connection::Claim() {
  uint64_t none = 0;
  if (says_executed_ && !executing_.compare_exchange_strong(none, kClaimed, std::memory_order_acq_rel)) return false;
  uint32_t load = load_.load(std::memory_order_acquire);
  while (load < max_in_flight_) {
    if (load_.compare_exchange_weak(load, load + 1, std::memory_order_acq_rel)) return true;
  }
  if (says_executed_) executing_.store(0, std::memory_order_release);
  return false;
}

bool Connection::ClaimAhead() {
  uint32_t load = 1;
  return takes_ahead() && load_.compare_exchange_strong(load, 2, std::memory_order_acq_rel);
}

// ---- greeting -------------------------------------------------------------------------------------------------------

bool Connection::SendGreetingLocked(MessageType type, const std::string& text) {
  Message message = MessageOf(type);
  uint8_t body[sizeof(Greeting) + kMaxText];
  Greeting greeting{};
  std::memcpy(greeting.magic, kMagic, sizeof(kMagic));
  greeting.major = kMajor;
  greeting.minor = kMinor;
  greeting.pid = static_cast<uint32_t>(getpid());
  greeting.uid = static_cast<uint32_t>(geteuid());
  greeting.max_in_flight = max_in_flight_;
  greeting.capabilities = capabilities_;
  greeting.model_flags = (settings_.batching ? kModelBatching : 0) | (settings_.decoupled ? kModelDecoupled : 0);
  greeting.text_length = static_cast<uint32_t>(std::min<size_t>(text.size(), kMaxText));
  greeting.model_version = model_.version;
  greeting.arena_budget = settings_.arena_budget_bytes;
  greeting.arena_idle_ms = settings_.arena_idle_ms;
  greeting.execution_timeout_ms = settings_.execution_timeout_ms;
  std::memcpy(body, &greeting, sizeof(greeting));
  std::memcpy(body + sizeof(greeting), text.data(), greeting.text_length);
  std::string error;
  return WriteLocked(&message, body, sizeof(greeting) + greeting.text_length, -1, &error);
}

bool Connection::IsForThisModel(const std::string& text, uint64_t version, std::string* error) const {
  const auto line = [&text](int number) -> std::string {
    size_t begin = 0;
    for (int i = 0; i < number; ++i) {
      begin = text.find('\n', begin);
      if (begin == std::string::npos) return "";
      ++begin;
    }
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  const std::string model = line(1);
  const std::string digest = line(2);
  if ((!model.empty() && model != model_.name) || (version != 0 && version != model_.version)) {
    *error = "this socket is of model '" + model_.name + "' version " + std::to_string(model_.version) +
             ", the worker is for model '" + model + "' version " + std::to_string(version) +
             ": give each model its own socket";
    return false;
  }
  if (!digest.empty() && !settings_.tensors_digest.empty() && digest != settings_.tensors_digest) {
    *error = "the worker was made for other tensors than model '" + model_.name +
             "' has: their names, dtypes, shapes and order must agree (the digest of the model's is " +
             settings_.tensors_digest + ", of the worker's " + digest + ")";
    return false;
  }
  return true;
}

bool Connection::IsSameUser(ucred* peer, std::string* error) const {
  socklen_t length = sizeof(*peer);
  if (getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, peer, &length) != 0) {
    *error = std::string("SO_PEERCRED failed: ") + std::strerror(errno);
    return false;
  }
  if (peer->uid == geteuid()) return true;
  *error = "it runs as user " + std::to_string(peer->uid) + ", the server as user " + std::to_string(geteuid()) +
           ": both must be the same user";
  return false;
}

void Connection::ActivityLocked(std::string* error) {
  ucred peer{};
  if (!IsSameUser(&peer, error)) return;
  const Activity activity = owner_->GetActivity();
  Message message = MessageOf(MessageType::kActivity);
  message.batch = activity.taken;
  message.length = activity.in_flight;
  bool sent;  // if false, whoever asked asks again
  if (TryWriteLocked(&message, &sent, error)) CloseLocked("it knows what it asked for", true);
}

bool Connection::HelloLocked(MessageType type, const uint8_t* body, uint32_t body_length, std::string* error) {
  Greeting greeting{};
  std::memcpy(&greeting, body, std::min<size_t>(body_length, sizeof(greeting)));
  constexpr size_t kVersionEnd = offsetof(Greeting, pid);
  if (body_length < kVersionEnd || std::memcmp(greeting.magic, kMagic, sizeof(kMagic)) != 0) {
    *error = "its first message is not the greeting of a pytriton worker";
    return false;
  }
  const std::string theirs = VersionText(greeting.major, greeting.minor);
  if (greeting.major != kMajor) {
    *error = "the worker speaks protocol " + theirs + ", this proxy backend " + VersionText(kMajor, kMinor) +
             ": the major versions must agree. Install the same version of pytriton-proxy-backend for the worker as "
             "the one whose " + "libtriton_pytriton.so the server has loaded";
    return false;
  }
  if (body_length < sizeof(greeting) || greeting.text_length > body_length - sizeof(greeting)) {
    *error = "its greeting of " + std::to_string(body_length) + " bytes is cut off";
    return false;
  }
  ucred peer{};
  const bool is_same_user = IsSameUser(&peer, error);
  const std::string text(reinterpret_cast<const char*>(body) + sizeof(greeting), greeting.text_length);
  const std::string name = text.substr(0, text.find('\n'));
  label_ = "worker '" + name + "' (pid " + std::to_string(peer.pid) + ")";
  if (!is_same_user) return false;
  if (!IsForThisModel(text, greeting.model_version, error)) return false;
  capabilities_ = greeting.capabilities & kCapabilities;
  if (owner_->calls() == nullptr) capabilities_ &= ~uint64_t{kCapCalls};
  if (type == MessageType::kCaller) {
    HandOverLocked();
    return true;
  }
  says_executed_ = (capabilities_ & kCapExecuted) != 0;
  stands_in_ = (capabilities_ & kCapStandsIn) != 0;
  asleep_ = (capabilities_ & kCapAsleep) != 0;
  if (settings_.decoupled && (capabilities_ & kCapDecoupled) == 0) {
    *error = "the model is decoupled and the worker, protocol " + theirs + ", cannot answer so";
    return false;
  }
  max_in_flight_ = std::min(std::max(greeting.max_in_flight, 1u), uint32_t{kMaxInFlight});
  has_ahead_ = (capabilities_ & kCapAhead) != 0 && max_in_flight_ == 1 && !says_executed_ && !settings_.decoupled;
  if (asleep_) return AttachAsleepLocked(theirs);
  // The first segment is sent with the greeting, so that the first request does not wait for it. A worker for which
  // there is no memory is not welcomed, because it would count as attached.
  Segment* segment = inputs_.AddSegment(1, error);
  if (segment == nullptr) {
    const int code = errno;
    *error = "its arena could not be made: " + *error;
    owner_->WorkerLost(label_ + ": " + *error);
    // The system will deny this the next time, too, so the worker is refused.
    if (code == EFBIG || code == EPERM || code == EACCES || code == ENOSYS) return false;
    // The system lacks memory or descriptors at the moment: the connection ends, and the worker tries again.
    CloseLocked(*error, false);
    error->clear();
    return true;
  }
  if (!SendGreetingLocked(MessageType::kWelcome, model_.name)) {
    CloseLocked("the answer to its greeting could not be sent", false);
    return true;
  }
  if (!SendSegmentLocked(segment, error)) {
    CloseLocked("it could not be sent its arena: " + *error, false);
    error->clear();
    return true;
  }
  owner_->WorkersChanged();
  state_.store(ConnectionState::kAttached, std::memory_order_release);
  PYTRITON_LOG(INFO, model_.Begin() + label_ + " attached, protocol " + theirs);
  return true;
}

bool Connection::AttachAsleepLocked(const std::string& version) {
  if (!SendGreetingLocked(MessageType::kWelcome, model_.name)) {
    CloseLocked("the answer to its greeting could not be sent", false);
    return true;
  }
  // With room for no batch this worker is never idle, so the search for an idle worker needs no check for those asleep.
  // It needs no arena, either.
  max_in_flight_ = 0;
  state_.store(ConnectionState::kAttached, std::memory_order_release);
  PYTRITON_LOG(INFO, model_.Begin() + label_ + " is attached and asleep, protocol " + version);
  return true;
}

void Connection::Wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!can_wake()) return;
  woken_.store(true, std::memory_order_release);
  Message wake = MessageOf(MessageType::kWake);
  bool sent = false;
  std::string error;
  // Only the greeting has been sent on this socket so far, so it has room.
  if (TryWriteLocked(&wake, &sent, &error) && sent) return;
  CloseLocked("it could not be told to wake" + (error.empty() ? "" : ": " + error), false);
}

void Connection::HandOverLocked() {
  const int fd = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) {
    CloseLocked("its connection for calls could not be made: " + Errno("fcntl"), false);
    return;
  }
  if (!SendGreetingLocked(MessageType::kWelcome, model_.name)) {
    close(fd);
    CloseLocked("the answer to its greeting could not be sent", false);
    return;
  }
  // From here on the socket belongs to the call service: it leaves the list of connections without being shut down.
  state_.store(ConnectionState::kClosed, std::memory_order_release);
  owner_->calls()->Serve(fd, label_);
}

// ---- what it reads --------------------------------------------------------------------------------------------------

void Connection::ReleaseInputLocked(Batch* batch) {
  if (!batch->input_in_use) return;
  inputs_.Release(batch->input.segment, batch->input.offset);
  batch->input_in_use = false;
}

void Connection::BatchDoneLocked(uint64_t batch, uint16_t flags) {
  if (says_executed_ && executing_ == batch && (flags & kFlagExecuting) == 0) {
    executing_.store(0, std::memory_order_release);
  }
  spare_ = in_flight_.extract(batch);
  const Batch& done = *spare_.mapped();
  if (done.cost != 0 && !done.waits && !done.expired && in_flight_.empty()) {
    owner_->Took(done.cost, NowNs() - done.sent_ns());
  }
  if (has_ahead_) {
    nearly_done_ns_.store(kNever, std::memory_order_release);
    if (done.full && !done.waits) pace_.Took(NowNs() - done.sent_ns());
    for (const auto& entry : in_flight_) {
      Batch& next = *entry.second;
      if (!next.waits) continue;
      next.waits = false;
      next.MarkSent();
      BeginLocked(next);
    }
  }
  spare_.mapped().reset();
  load_.fetch_sub(1, std::memory_order_acq_rel);
}

void Connection::BeginLocked(const Batch& batch) {
  const uint64_t after_ns = batch.full ? pace_.nearly_done_ns() : kNever;
  if (after_ns != kNever) nearly_done_ns_.store(batch.sent_ns() + after_ns, std::memory_order_release);
}

// Answers a batch with the record of so many bytes that lies there.
bool Connection::RespondLocked(Batch* batch, const uint8_t* record, uint64_t length, std::string* error) {
  const Block given_back{};  // nothing may refer to this batch's inputs any more
  const Block* inputs = batch->input_in_use ? &batch->input : &given_back;
  if (!record_.Parse(
          record, length, batch->id(), batch->size(), settings_.decoupled, error, nullptr,
          (capabilities_ & kCapReferences) != 0 ? inputs : nullptr)) {
    *error = "its response record is malformed: " + *error;
    return false;
  }
  batch->Respond(record_);
  if (settings_.decoupled && settings_.stream_backlog_bytes != 0) PaceLocked(batch, NowNs(), error);
  return error->empty();
}

bool Connection::ResponsesLocked(const Message& message, std::string* error) {
  ++consumed_;
  const auto segment = outputs_.Find(message.segment, message.offset, message.length, error);
  if (!segment) {
    *error = "its responses lie " + *error;
    return false;
  }
  const uint8_t* at = segment->data() + message.offset;
  uint64_t left = message.length;
  while (left > 0) {
    // A copy, since the worker may write there at any time.
    RecordHeader header{};
    if (left >= sizeof(header)) std::memcpy(&header, at, sizeof(header));
    if (header.record_length < sizeof(header) || header.record_length > left ||
        header.record_length % kAlignment != 0) {
      *error = "a record of " + std::to_string(header.record_length) + " bytes begins where " + std::to_string(left) +
               " are left of its responses";
      return false;
    }
    const auto found = in_flight_.find(header.batch);
    if (found == in_flight_.end()) {
      *error = "it answered batch " + std::to_string(header.batch) + ", which it does not have";
      return false;
    }
    if (!RespondLocked(found->second.get(), at, header.record_length, error)) return false;
    at += header.record_length;
    left -= header.record_length;
  }
  return IsAcknowledgedLater(message.length) || AcknowledgeLocked(error);
}

bool Connection::ResponseLocked(const Message& message, std::string* error) {
  ++consumed_;
  auto found = in_flight_.find(message.batch);
  if (found == in_flight_.end()) {
    *error = "it answered batch " + std::to_string(message.batch) + ", which it does not have";
    return false;
  }
  const auto segment = outputs_.Find(message.segment, message.offset, message.length, error);
  if (!segment) {
    *error = "its response lies " + *error;
    return false;
  }
  Batch* batch = found->second.get();
  if (!RespondLocked(batch, segment->data() + message.offset, message.length, error)) return false;
  // The inputs are released only now, because outputs may lie in them.
  if ((message.flags & kFlagInputReleased) != 0) ReleaseInputLocked(batch);
  if ((message.flags & kFlagBatchDone) != 0) {
    if (!batch->finished()) {
      batch->Fail(TRITONSERVER_ERROR_INTERNAL, label_ + " ended the batch without an answer to this request");
    }
    BatchDoneLocked(message.batch, message.flags);
  }
  return IsAcknowledgedLater(message.length) || AcknowledgeLocked(error);
}

bool Connection::IsAcknowledgedLater(uint64_t length) {
  if (length > kAcknowledgedLaterBytes) return false;
  if (!settings_.decoupled) return true;
  // The acknowledgement of a stream's response is put off, because it would wake the worker each time, and the stream
  // goes on without it.
  unacknowledged_bytes_ += length;
  return consumed_ - acknowledged_ < kMostUnacknowledged && unacknowledged_bytes_ <= kAcknowledgedLaterBytes &&
         unacknowledged_bytes_ <= settings_.arena_budget_bytes / kPartsOfBudget;
}

bool Connection::FailLocked(
    const Message& message, const uint8_t* body, uint32_t body_length, std::string* error) {
  auto found = in_flight_.find(message.batch);
  if (found == in_flight_.end()) {
    *error = "it failed batch " + std::to_string(message.batch) + ", which it does not have";
    return false;
  }
  if ((message.flags & kFlagInputReleased) != 0) ReleaseInputLocked(found->second.get());
  const auto code = message.index <= TRITONSERVER_ERROR_CANCELLED
                        ? static_cast<TRITONSERVER_Error_Code>(message.index)
                        : TRITONSERVER_ERROR_INTERNAL;
  found->second->Fail(code, std::string(reinterpret_cast<const char*>(body), body_length));
  BatchDoneLocked(message.batch, message.flags);
  return true;
}

bool Connection::ExecutedLocked(const Message& message, std::string* error) {
  if (says_executed_ && message.batch != 0 && executing_ == message.batch) {
    executing_.store(0, std::memory_order_release);
    return true;
  }
  *error = "it says that it has executed batch " + std::to_string(message.batch) + ", which it is not at";
  return false;
}

bool Connection::ReleaseLocked(const Message& message, std::string* error) {
  for (auto& entry : in_flight_) {
    Batch* batch = entry.second.get();
    if (batch->input_in_use && batch->input.segment == message.segment && batch->input.offset == message.offset) {
      ReleaseInputLocked(batch);
      return true;
    }
  }
  if (!inputs_.Release(message.segment, message.offset)) {
    *error = "it released the block at " + std::to_string(message.offset) + " of segment " +
             std::to_string(message.segment) + ", which is not in use";
    return false;
  }
  return true;
}

bool Connection::HandleLocked(const Packet& packet, std::string* error) {
  const Message& message = packet.message;
  const auto type = static_cast<MessageType>(message.type);
  if (state() == ConnectionState::kGreeting) {
    if (type == MessageType::kHello || (type == MessageType::kCaller && owner_->calls() != nullptr)) {
      if (HelloLocked(type, packet.body, packet.body_length, error)) return true;
      SendGreetingLocked(MessageType::kRefuse, *error);
      return false;
    }
    if (packet.fd >= 0) close(packet.fd);
    if (type == MessageType::kActivity) {
      ActivityLocked(error);
      return error->empty();
    }
    *error = "it sent message " + std::to_string(message.type) + " before its greeting";
    return false;
  }
  switch (type) {
    case MessageType::kSegment:
      return outputs_.Add(message.segment, packet.fd, message.length, error);
    case MessageType::kSegmentClose:
      outputs_.Remove(message.segment);
      return true;
    case MessageType::kResponse:
      return ResponseLocked(message, error);
    case MessageType::kResponses:
      return ResponsesLocked(message, error);
    case MessageType::kFail:
      return FailLocked(message, packet.body, packet.body_length, error);
    case MessageType::kRelease:
      return ReleaseLocked(message, error);
    case MessageType::kExecuted:
      return ExecutedLocked(message, error);
    case MessageType::kDetach:
      state_.store(ConnectionState::kDetaching, std::memory_order_release);
      return true;
    default:
      *error = "it sent message " + std::to_string(message.type) + ", which a worker does not send";
      return false;
  }
}

void Connection::ProcessEnded() {
  pollfd more{fd_, POLLIN, 0};
  while (state() != ConnectionState::kClosed && poll(&more, 1, 0) > 0) Process();
  Close("its process has ended", false);
}

void Connection::Process() {
  std::lock_guard<std::mutex> lock(mutex_);
  ProcessLocked();
}

void Connection::ProcessLocked() {
  Packet packet;
  uint64_t deadline_ns = 0;
  // Responses that are read in one go are written to their callers together, also those of several streams.
  std::optional<SentTogether> together;
  if (settings_.decoupled) together.emplace();
  while (state() != ConnectionState::kClosed) {
    std::string error;
    const Received received = ReceivePacket(fd_, &packet, &error);
    if (received == Received::kNothing) break;
    if (silent_) {
      silent_ = false;
      silent_since_ns_ = 0;
    }
    if (received == Received::kReset) {
      was_reset_ = true;
      continue;
    }
    if (received == Received::kEnd) {
      const bool expected = state() == ConnectionState::kDetaching && in_flight_.empty();
      CloseLocked("it closed its connection", expected);
      break;
    }
    if (received == Received::kPacket) HandleLocked(packet, &error);
    if (!error.empty()) {
      CloseLocked(error, false);
      break;
    }
    // Everything that was waited for has come, so the socket is not read once more; a later message makes it readable
    // again.
    if ((packet.message.flags & kFlagBatchDone) != 0 && (in_flight_.empty() || has_ahead_)) break;
    // A worker may send a stream faster than it is read here, so other workers and cancellations get their turn.
    const uint64_t now_ns = NowNs();
    if (deadline_ns == 0) {
      deadline_ns = now_ns + kTurnNs;
    } else if (now_ns >= deadline_ns) {
      break;
    }
  }
  if (state() == ConnectionState::kDetaching && in_flight_.empty() && load() == 0) {
    CloseLocked("it detached", true);
  }
}

// ---- what it sends --------------------------------------------------------------------------------------------------

Sent Connection::SendLocked(Message* message, const void* body, size_t body_length, int fd, std::string* error) {
  const Sent sent = SendPacket(fd_, message, body, body_length, fd, error);
  const bool is_batch = message->type == static_cast<uint16_t>(MessageType::kBatch);
  if (sent == Sent::kSent) last_sent_ = is_batch ? message->batch : 0;
  return sent;
}

bool Connection::WriteLocked(
    Message* message, const void* body, size_t body_length, int fd, std::string* error) {
  const uint64_t deadline_ns = NowNs() + uint64_t{kSendTimeoutMs} * 1000000u;
  for (;;) {
    const Sent sent = SendLocked(message, body, body_length, fd, error);
    if (sent != Sent::kNoRoom) return sent == Sent::kSent;
    const uint64_t now_ns = NowNs();
    if (now_ns >= deadline_ns) {
      *error = "it read nothing from its socket for " + std::to_string(kSendTimeoutMs / 1000) + " s";
      return false;
    }
    pollfd wait{fd_, POLLOUT, 0};
    poll(&wait, 1, static_cast<int>((deadline_ns - now_ns) / 1000000u) + 1);
  }
}

bool Connection::has_room() const {
  if (load() <= kMostUnread) return true;
  pollfd room{fd_, POLLOUT, 0};
  // Linux reports room while at most a quarter of the buffer is used, so a batch and the message about its segment fit.
  return poll(&room, 1, 0) != 0;
}

bool Connection::has_unread() const {
  int unread = 0;
  return ioctl(fd_, SIOCOUTQ, &unread) == 0 && unread > 0;
}

bool Connection::TryWriteLocked(Message* message, bool* sent, std::string* error) {
  // This writes only while a quarter of the buffer is used at most. The rest stays free for what the worker must be
  // sent, even if it reads nothing.
  pollfd room{fd_, POLLOUT, 0};
  *sent = false;
  if (poll(&room, 1, 0) == 0 || (has_ahead_ && last_sent_ != 0 && has_unread())) return true;
  const Sent result = SendLocked(message, nullptr, 0, -1, error);
  *sent = result == Sent::kSent;
  return result != Sent::kFailed;
}

bool Connection::AcknowledgeLocked(std::string* error) {
  Message release = MessageOf(MessageType::kRelease);
  release.consumed = consumed_;
  bool sent = false;
  if (!TryWriteLocked(&release, &sent, error)) return false;
  // The count is a running sum, so the next acknowledgement includes one that found no room.
  if (sent) {
    acknowledged_ = consumed_;
    unacknowledged_bytes_ = 0;
  }
  acknowledgement_due_ = !sent;
  return true;
}

bool Connection::AddSegmentLocked(uint64_t length, std::string* error) {
  Segment* segment = inputs_.AddSegment(length, error);
  return segment != nullptr && SendSegmentLocked(segment, error);
}

bool Connection::SendSegmentLocked(Segment* segment, std::string* error) {
  Message message = MessageOf(MessageType::kSegment);
  message.segment = segment->id();
  message.length = segment->size();
  const bool sent = WriteLocked(&message, nullptr, 0, segment->fd(), error);
  segment->CloseFd();
  return sent;
}

Connection::SendResult Connection::AllocateLocked(uint64_t length, Block* block, std::string* error) {
  Arena::Result allocated = inputs_.Allocate(length, block);
  if (allocated == Arena::Result::kFull && length <= inputs_.budget()) {
    // Segments that were made for smaller batches are removed for a larger one.
    for (const uint32_t id : inputs_.DropUnused()) {
      Message close = MessageOf(MessageType::kSegmentClose);
      close.segment = id;
      if (!WriteLocked(&close, nullptr, 0, -1, error)) {
        CloseLocked(*error, false);
        return SendResult::kClosed;
      }
    }
    allocated = inputs_.Allocate(length, block);
  }
  if (allocated == Arena::Result::kNeedSegment) {
    if (!AddSegmentLocked(length, error)) {
      *error = "memory for the inputs of the batch could not be had: " + *error;
      return SendResult::kFailed;
    }
    allocated = inputs_.Allocate(length, block);
  }
  if (allocated != Arena::Result::kOk) {
    if (length <= inputs_.budget() && !in_flight_.empty()) return SendResult::kBusy;
    *error = "the inputs of the batch take " + std::to_string(length) +
             " bytes; the arena of this worker may have " + std::to_string(inputs_.budget()) + " bytes, of which " +
             std::to_string(inputs_.in_use()) +
             " are in use (by inputs that the callable keeps). Raise arena_budget_bytes of the model, or send "
             "smaller batches";
    return SendResult::kRefused;
  }
  return SendResult::kSent;
}

Connection::SendResult Connection::Send(std::unique_ptr<Batch>* batch, BatchSource* scratch, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto give_back = [this](SendResult result) {
    if (says_executed_) executing_.store(0, std::memory_order_release);
    load_.fetch_sub(1, std::memory_order_acq_rel);
    return result;
  };
  if (state() == ConnectionState::kClosed) return give_back(SendResult::kClosed);
  if (!has_room()) return give_back(SendResult::kUnread);
  BatchLayout layout;
  Block block;
  const auto give_up = [&](SendResult result) {
    if (block.data != nullptr) inputs_.Release(block.segment, block.offset);
    return give_back(result);
  };
  do {
    (*batch)->Collect(scratch);
    if ((*batch)->finished()) return give_up(SendResult::kAnswered);
    if (!LayoutBatch(*scratch, &layout, error)) return give_up(SendResult::kRefused);
    if (block.data == nullptr) {
      const SendResult allocated = AllocateLocked(layout.record_length, &block, error);
      if (allocated != SendResult::kSent) return give_back(allocated);
    }
    // The record has got shorter at most, because refused requests were left out.
    block.length = layout.record_length;
    WriteBatch(*scratch, layout, (*batch)->id(), (*batch)->started_ns(), block.data);
  } while (!(*batch)->CompleteRecord(*scratch, layout, block.data));
  (*batch)->input = block;
  (*batch)->input_in_use = true;
  Message message = MessageOf(MessageType::kBatch);
  message.batch = (*batch)->id();
  message.consumed = acknowledged_ = consumed_;
  unacknowledged_bytes_ = 0;
  message.segment = block.segment;
  message.offset = block.offset;
  message.length = layout.record_length;
  if (says_executed_) executing_.store(message.batch, std::memory_order_release);
  StampSent(block.data, (*batch)->MarkSent());
  if (settings_.cost_limit != 0 && !has_ahead_ && !in_flight_.empty()) {
    // Batches that a worker has at the same time are not measured, because their times say little about their costs.
    (*batch)->cost = 0;
    for (auto& entry : in_flight_) entry.second->cost = 0;
  }
  // A worker that is gone by now may have left another value.
  (*batch)->waits = has_ahead_ && !in_flight_.empty();
  if (has_ahead_) {
    (*batch)->full = IsFull(*scratch, model_.max_rows);
    if (!(*batch)->waits) BeginLocked(**batch);
  }
  if (!WriteLocked(&message, nullptr, 0, -1, error)) {
    inputs_.Release(block.segment, block.offset);
    (*batch)->input_in_use = false;
    // Answers that the worker sent before it closed the socket count.
    pollfd more{fd_, POLLIN, 0};
    while (state() != ConnectionState::kClosed && poll(&more, 1, 0) > 0 && (more.revents & POLLHUP) != 0) ProcessLocked();
    CloseLocked(*error, false);
    return give_back(SendResult::kClosed);
  }
  if (spare_.empty()) {
    in_flight_[message.batch] = std::move(*batch);
  } else {
    spare_.key() = message.batch;
    spare_.mapped() = std::move(*batch);
    in_flight_.insert(std::move(spare_));
  }
  return SendResult::kSent;
}

// ---- time, and the end ----------------------------------------------------------------------------------------------

bool Connection::SendCancelLocked(Batch* batch, uint32_t request, std::string* error) {
  if (batch->input_in_use) batch->input.data[CancelledOffset(request)] = 1;
  if ((capabilities_ & kCapCancel) == 0) return true;
  if (!error->empty()) return false;
  Message message = MessageOf(MessageType::kCancel);
  message.batch = batch->id();
  message.index = request;
  bool sent = false;  // if false, it is sent at a later tick
  return TryWriteLocked(&message, &sent, error) && sent;
}

bool Connection::PollCancelledLocked(uint64_t now_ns, std::string* error) {
  for (auto& entry : in_flight_) {
    Batch* batch = entry.second.get();
    if (now_ns - batch->started_ns() < kCancelPollNs) continue;
    batch->PollCancelled([&](uint32_t request) { return SendCancelLocked(batch, request, error); });
    if (!error->empty()) return false;
  }
  return true;
}

void Connection::PaceLocked(Batch* batch, uint64_t now_ns, std::string* error) {
  batch->LookAtPaces(settings_.stream_backlog_bytes, owner_->wake_fd(), now_ns, [&](uint32_t request, bool pauses) {
    if ((capabilities_ & kCapPace) == 0 || !error->empty()) return false;
    Message message = MessageOf(pauses ? MessageType::kPause : MessageType::kResume);
    message.batch = batch->id();
    message.index = request;
    bool sent = false;  // if false, it is sent at the next tick
    return TryWriteLocked(&message, &sent, error) && sent;
  });
}

bool Connection::EndStalledLocked(uint64_t now_ns, std::string* error) {
  if (!settings_.decoupled || settings_.stream_backlog_bytes == 0) return true;
  for (auto& entry : in_flight_) {
    Batch* batch = entry.second.get();
    PaceLocked(batch, now_ns, error);
    if (!error->empty()) return false;
    if (settings_.stream_stall_timeout_ms == 0 || !batch->is_paused()) continue;
    const auto text = [this] {
      return model_.Begin() + "the caller has taken less than " +
             std::to_string(StreamPace::LeastTaken(settings_.stream_backlog_bytes)) + " bytes of the stream in " +
             std::to_string(settings_.stream_stall_timeout_ms) + " ms, while more than half of " +
             std::to_string(settings_.stream_backlog_bytes) + " waited for it, so the stream was ended. Read responses " +
             "as they come, or have the model wait longer: stream_stall_timeout_s";
    };
    batch->EndStalled(settings_.stream_stall_timeout_ms * 1000000u, now_ns, text,
                      [&](uint32_t request) { return SendCancelLocked(batch, request, error); });
    if (!error->empty()) return false;
  }
  return true;
}

bool Connection::ExpireLocked(uint64_t now_ns, std::string* error) {
  const uint64_t limit_ns = settings_.execution_timeout_ms * 1000000u;
  const std::string limit = std::to_string(settings_.execution_timeout_ms) + " ms";
  for (auto& entry : in_flight_) {
    Batch* batch = entry.second.get();
    // A response that was read after `now_ns` was taken would make this difference wrap around, so it is compared
    // first.
    if (batch->expired || batch->waits || batch->is_paused() || now_ns <= batch->active_ns() || now_ns - batch->active_ns() < limit_ns) continue;
    batch->expired = true;
    batch->CancelOpen([&](uint32_t request) { return SendCancelLocked(batch, request, error); });
    batch->Fail(
        TRITONSERVER_ERROR_UNAVAILABLE,
        model_.Begin() + label_ + " " + std::string(kTimeLimitText) + ", " + limit +
            ". It may still be at it; look into its log for what it does, or allow more time");
    const std::string what = "execution timeout: batch " + std::to_string(batch->id()) + " took longer than " + limit;
    if (max_in_flight_ == 1) {
      // A worker that takes one batch at a time reads nothing until it is done, so it is disconnected. It attaches
      // again afterwards.
      *error = what;
      return false;
    }
    PYTRITON_LOG(ERROR, model_.Begin() + label_ + ": " + what);
    if (!silent_) {
      silent_ = true;
      silent_since_ns_ = now_ns;
    }
    if (!error->empty()) return false;
  }
  if (silent_ && now_ns > silent_since_ns_ && now_ns - silent_since_ns_ >= kSilenceNs) {
    *error = "execution timeout: a batch took longer than " + limit + ", and nothing came from the worker in " +
             std::to_string(kSilenceNs / 1000000) + " ms after that";
    return false;
  }
  return true;
}

void Connection::Tick(uint64_t now_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state() == ConnectionState::kClosed || state() == ConnectionState::kGreeting) return;
  std::string error;
  if (PollCancelledLocked(now_ns, &error) && EndStalledLocked(now_ns, &error) && settings_.execution_timeout_ms != 0) {
    ExpireLocked(now_ns, &error);
  }
  if (error.empty() && has_room() && !(has_ahead_ && has_unread())) {
    for (const uint32_t id : inputs_.Trim(now_ns, settings_.arena_idle_ms * 1000000u)) {
      Message message = MessageOf(MessageType::kSegmentClose);
      message.segment = id;
      if (!WriteLocked(&message, nullptr, 0, -1, &error)) break;
    }
  }
  // With a batch ahead, the next message to this worker comes late, and the worker may wait for room until then.
  const bool is_due = in_flight_.empty() || acknowledgement_due_ || has_ahead_ || settings_.decoupled;
  if (error.empty() && acknowledged_ != consumed_ && is_due) AcknowledgeLocked(&error);
  if (!error.empty()) CloseLocked(error, false);
}

bool Connection::UseRequest(
    uint64_t batch, uint32_t index, const std::function<void(TRITONBACKEND_Request*)>& use) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = in_flight_.find(batch);
  TRITONBACKEND_Request* request = found == in_flight_.end() ? nullptr : found->second->request(index);
  if (request != nullptr) use(request);
  return request != nullptr;
}

void Connection::Close(const std::string& reason, bool expected) {
  std::lock_guard<std::mutex> lock(mutex_);
  CloseLocked(reason, expected);
}

bool Connection::HasAnsweredLocked() {
  Packet packet;
  for (;;) {
    std::string error;
    switch (ReceivePacket(fd_, &packet, &error)) {
      case Received::kPacket:
        if (packet.fd >= 0) close(packet.fd);
        if ((packet.message.flags & kFlagBatchDone) != 0) return true;
        break;
      case Received::kReset:
        break;
      case Received::kBroken:
        return true;  // something has come, whatever it is
      default:
        return false;
    }
  }
}

void Connection::CloseLocked(const std::string& reason, bool expected) {
  if (state() == ConnectionState::kClosed) return;
  const bool attached = state() != ConnectionState::kGreeting;
  state_.store(ConnectionState::kClosed, std::memory_order_release);
  shutdown(fd_, SHUT_RDWR);
  if (attached && !asleep_) owner_->WorkersChanged();
  const std::string where = model_.Begin();
  if (expected) {
    if (attached) PYTRITON_LOG(INFO, where + label_ + " detached: " + reason);
  } else {
    PYTRITON_LOG(ERROR, where + label_ + " is gone: " + reason);
    if (attached) owner_->WorkerLost(label_ + ": " + reason);
  }
  nearly_done_ns_.store(kNever, std::memory_order_release);
  const uint32_t left = static_cast<uint32_t>(in_flight_.size());
  for (auto& entry : in_flight_) {
    auto& batch = entry.second;
    const bool not_begun =
        (was_reset_ && last_sent_ == batch->id()) || (batch->waits && !HasAnsweredLocked());
    if (!expected && not_begun && !batch->expired && batch->returns < kMostReturns) {
      ++batch->returns;
      owner_->TakeBack(std::move(batch));
      continue;
    }
    const std::string loss = label_ + " " + std::string(kWorkerLostText) + ": " + reason;
    if (!expected && settings_.repeatable && batch->untouched() && !batch->expired && batch->loss.empty()) {
      batch->loss = loss;
      owner_->TakeBack(std::move(batch));
      continue;
    }
    const std::string before = batch->loss.empty() ? "" : " It was the second: " + batch->loss + ".";
    batch->Fail(
        TRITONSERVER_ERROR_UNAVAILABLE,
        where + loss + "." + before +
            " The request may have been carried out; look into the worker's log for the cause, and send it again if "
            "that is safe");
  }
  load_.fetch_sub(left, std::memory_order_acq_rel);
  in_flight_.clear();
  outputs_.Clear();
}

}  // namespace pytriton
