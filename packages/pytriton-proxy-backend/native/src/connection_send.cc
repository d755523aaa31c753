// What a connection sends, and how it ends. What it reads is in connection.cc.
#include "connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "triton_util.h"

namespace pytriton {

namespace {

constexpr int kSendTimeoutMs = 5000;
constexpr uint64_t kCancelPollNs = 20 * 1000 * 1000;
// How long a worker with several batches may say nothing at all after one of them has expired.
constexpr uint64_t kSilenceNs = 1000 * 1000 * 1000;

}  // namespace

bool Connection::WriteLocked(
    Message* message, const void* body, size_t body_length, int fd, std::string* error) {
  message->size = static_cast<uint32_t>(sizeof(Message) + body_length);
  iovec parts[2] = {{message, sizeof(Message)}, {const_cast<void*>(body), body_length}};
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = body_length == 0 ? 1 : 2;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(cmsg), &fd, sizeof(int));
  }
  const uint64_t deadline_ns = NowNs() + uint64_t{kSendTimeoutMs} * 1000000u;
  for (;;) {
    if (sendmsg(fd_, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return true;
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      *error = std::string("sending to it failed: ") + std::strerror(errno);
      return false;
    }
    const uint64_t now_ns = NowNs();
    if (now_ns >= deadline_ns) {
      *error = "it read nothing from its socket for " + std::to_string(kSendTimeoutMs / 1000) + " s";
      return false;
    }
    pollfd wait{fd_, POLLOUT, 0};
    poll(&wait, 1, static_cast<int>((deadline_ns - now_ns) / 1000000u) + 1);
  }
}

bool Connection::TryWriteLocked(Message* message, bool* sent, std::string* error) {
  message->size = sizeof(Message);
  do {
    *sent = send(fd_, message, sizeof(Message), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
  } while (!*sent && errno == EINTR);
  if (*sent || errno == EAGAIN || errno == EWOULDBLOCK) return true;
  *error = std::string("sending to it failed: ") + std::strerror(errno);
  return false;
}

bool Connection::AcknowledgeLocked(std::string* error) {
  Message release{};
  release.type = static_cast<uint16_t>(MessageType::kRelease);
  release.consumed = consumed_;
  bool sent = false;
  if (!TryWriteLocked(&release, &sent, error)) return false;
  // The count is cumulative: a later acknowledgement makes up for one that found no room.
  if (sent) acknowledged_ = consumed_;
  acknowledgement_due_ = !sent;
  return true;
}

bool Connection::AddSegmentLocked(uint64_t length, std::string* error) {
  Segment* segment = inputs_.AddSegment(length, error);
  if (segment == nullptr) return false;
  Message message{};
  message.type = static_cast<uint16_t>(MessageType::kSegment);
  message.segment = segment->id();
  message.length = segment->size();
  const bool sent = WriteLocked(&message, nullptr, 0, segment->fd(), error);
  segment->CloseFd();
  return sent;
}

Connection::SendResult Connection::Send(std::unique_ptr<Batch>* batch, BatchSource* scratch, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto give_back = [this](SendResult result) {
    load_.fetch_sub(1, std::memory_order_acq_rel);
    return result;
  };
  if (state() == ConnectionState::kClosed) return give_back(SendResult::kClosed);
  BatchLayout layout;
  if (!(*batch)->Collect(scratch, error) || !LayoutBatch(*scratch, &layout, error)) {
    return give_back(SendResult::kRefused);
  }
  Block block;
  Arena::Result allocated = inputs_.Allocate(layout.record_length, &block);
  if (allocated == Arena::Result::kFull && layout.record_length <= inputs_.budget()) {
    // Segments that were made for smaller batches make way for a larger one.
    for (const uint32_t id : inputs_.DropUnused()) {
      Message close{};
      close.type = static_cast<uint16_t>(MessageType::kSegmentClose);
      close.segment = id;
      if (!WriteLocked(&close, nullptr, 0, -1, error)) {
        CloseLocked(*error, false);
        return give_back(SendResult::kClosed);
      }
    }
    allocated = inputs_.Allocate(layout.record_length, &block);
  }
  if (allocated == Arena::Result::kNeedSegment) {
    if (!AddSegmentLocked(layout.record_length, error)) {
      *error = "memory for the inputs of the batch could not be had: " + *error;
      return give_back(SendResult::kFailed);
    }
    allocated = inputs_.Allocate(layout.record_length, &block);
  }
  if (allocated != Arena::Result::kOk) {
    if (layout.record_length <= inputs_.budget() && !in_flight_.empty()) return give_back(SendResult::kBusy);
    *error = "the inputs of the batch take " + std::to_string(layout.record_length) +
             " bytes; the arena of this worker may have " + std::to_string(inputs_.budget()) + " bytes, of which " +
             std::to_string(inputs_.in_use()) +
             " are in use (by inputs that the callable keeps). Raise arena_budget_bytes of the model, or send "
             "smaller batches";
    return give_back(SendResult::kRefused);
  }
  WriteBatch(*scratch, layout, (*batch)->id(), (*batch)->started_ns(), block.data);
  (*batch)->input = block;
  (*batch)->input_in_use = true;
  Message message{};
  message.type = static_cast<uint16_t>(MessageType::kBatch);
  message.batch = (*batch)->id();
  message.consumed = acknowledged_ = consumed_;
  message.segment = block.segment;
  message.offset = block.offset;
  message.length = layout.record_length;
  StampSent(block.data, (*batch)->MarkSent());
  if (!WriteLocked(&message, nullptr, 0, -1, error)) {
    inputs_.Release(block.segment, block.offset);
    (*batch)->input_in_use = false;
    CloseLocked(*error, false);
    return give_back(SendResult::kClosed);
  }
  in_flight_[message.batch] = std::move(*batch);
  return SendResult::kSent;
}

void Connection::SendCancelLocked(Batch* batch, uint32_t request, std::string* error) {
  if (batch->input_in_use) batch->input.data[CancelledOffset(request)] = 1;
  if ((capabilities_ & kCapCancel) == 0 || !error->empty()) return;
  Message message{};
  message.type = static_cast<uint16_t>(MessageType::kCancel);
  message.batch = batch->id();
  message.index = request;
  bool sent;  // if not, the byte above says the same
  TryWriteLocked(&message, &sent, error);
}

bool Connection::PollCancelledLocked(uint64_t now_ns, std::string* error) {
  for (auto& entry : in_flight_) {
    Batch* batch = entry.second.get();
    if (now_ns - batch->started_ns() < kCancelPollNs) continue;
    batch->PollCancelled([&](uint32_t request) { SendCancelLocked(batch, request, error); });
    if (!error->empty()) return false;
  }
  return true;
}

bool Connection::ExpireLocked(uint64_t now_ns, std::string* error) {
  const uint64_t limit_ns = settings_.execution_timeout_ms * 1000000u;
  const std::string limit = std::to_string(settings_.execution_timeout_ms) + " ms";
  for (auto& entry : in_flight_) {
    Batch* batch = entry.second.get();
    // The response that was read after `now_ns` was taken makes this difference wrap.
    if (batch->expired || now_ns <= batch->active_ns() || now_ns - batch->active_ns() < limit_ns) continue;
    batch->expired = true;
    batch->CancelOpen([&](uint32_t request) { SendCancelLocked(batch, request, error); });
    batch->Fail(
        TRITONSERVER_ERROR_UNAVAILABLE,
        "model '" + model_.name + "' version " + std::to_string(model_.version) + ": " + label_ +
            " took longer for this request than the model's execution timeout, " + limit +
            ". It may still be at it; look into its log for what it does, or allow more time");
    const std::string what = "execution timeout: batch " + std::to_string(batch->id()) + " took longer than " + limit;
    if (max_in_flight_ == 1) {
      // Whoever works on one batch at a time reads nothing before it is done: it attaches again when it is.
      *error = what;
      return false;
    }
    PYTRITON_LOG(ERROR, "model '" + model_.name + "' version " + std::to_string(model_.version) + ": " + label_ +
                            ": " + what);
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
  if (PollCancelledLocked(now_ns, &error) && settings_.execution_timeout_ms != 0) ExpireLocked(now_ns, &error);
  if (error.empty()) {
    for (const uint32_t id : inputs_.Trim(now_ns, settings_.arena_idle_ms * 1000000u)) {
      Message message{};
      message.type = static_cast<uint16_t>(MessageType::kSegmentClose);
      message.segment = id;
      if (!WriteLocked(&message, nullptr, 0, -1, &error)) break;
    }
  }
  if (error.empty() && acknowledged_ != consumed_ && (in_flight_.empty() || acknowledgement_due_)) {
    AcknowledgeLocked(&error);
  }
  if (!error.empty()) CloseLocked(error, false);
}

void Connection::Close(const std::string& reason, bool expected) {
  std::lock_guard<std::mutex> lock(mutex_);
  CloseLocked(reason, expected);
}

void Connection::CloseLocked(const std::string& reason, bool expected) {
  if (state() == ConnectionState::kClosed) return;
  const bool attached = state() != ConnectionState::kGreeting;
  state_.store(ConnectionState::kClosed, std::memory_order_release);
  shutdown(fd_, SHUT_RDWR);
  const std::string where = "model '" + model_.name + "' version " + std::to_string(model_.version) + ": ";
  if (expected) {
    if (attached) PYTRITON_LOG(INFO, where + label_ + " detached: " + reason);
  } else {
    PYTRITON_LOG(ERROR, where + label_ + " is gone: " + reason);
    if (attached) owner_->WorkerLost(label_ + ": " + reason);
  }
  const uint32_t left = static_cast<uint32_t>(in_flight_.size());
  for (auto& entry : in_flight_) {
    auto& batch = entry.second;
    const std::string loss = label_ + " was lost while it worked on this request: " + reason;
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
  outputs_.clear();
  outputs_size_ = 0;
}

}  // namespace pytriton
