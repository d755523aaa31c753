// Who gets which batch, and who waits for what. Sockets and the background thread are in endpoint.cc.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "endpoint.h"
#include "triton_util.h"

namespace pytriton {

namespace {

// How long a worker without room for the batch of a lost one is left alone.
constexpr uint64_t kNoRoomNs = 5 * kMillisecond;
// A batch that Triton hands over so soon after one that waited in vain has waited behind it, in Triton's queue.
constexpr uint64_t kBacklogNs = 50 * kMillisecond;

}  // namespace

std::shared_ptr<Connection> Endpoint::ClaimIdleLocked() {
  // The one with the least to do, in turns: one that is slow, or stopped, collects no more than the others have.
  size_t best = connections_.size();
  uint32_t least = UINT32_MAX;
  for (size_t i = 0; i < connections_.size() && least != 0; ++i) {
    const size_t place = (next_ + i) % connections_.size();
    const uint32_t load = connections_[place]->load();
    if (load >= least || !connections_[place]->idle()) continue;
    best = place;
    least = load;
  }
  if (best == connections_.size()) return nullptr;
  next_ = best + 1;
  connections_[best]->Claim();
  return connections_[best];
}

bool Endpoint::AnyAttachedLocked() const {
  return std::any_of(connections_.begin(), connections_.end(), [](const auto& connection) {
    return connection->state() == ConnectionState::kAttached;
  });
}

bool Endpoint::AnyIdleLocked() const {
  return std::any_of(
      connections_.begin(), connections_.end(), [](const auto& connection) { return connection->idle(); });
}

bool Endpoint::WaitFor(const std::function<bool()>& done, uint64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::vector<pollfd> fds;
  Connections busy;
  uint64_t tick_ns = NowNs() + kBusyTickNs;
  while (!done()) {
    const uint64_t now_ns = NowNs();
    if (now_ns >= deadline_ns) return false;
    const uint64_t wait_ns = std::min(deadline_ns - now_ns, kBusyTickNs);
    if (polling_) {
      changed_.wait_for(lock, std::chrono::nanoseconds(wait_ns));
      continue;
    }
    polling_ = true;
    fds.assign(1, {wake_fd_, POLLIN, 0});
    busy.clear();
    for (const auto& connection : connections_) {
      if (connection->load() == 0 || connection->state() == ConnectionState::kClosed) continue;
      busy.push_back(connection);
      fds.push_back({connection->fd(), POLLIN | POLLRDHUP, 0});
    }
    lock.unlock();
    const int ready = poll(fds.data(), fds.size(), static_cast<int>(wait_ns / kMillisecond) + 1);
    if (ready > 0) {
      if (fds[0].revents != 0) {
        uint64_t ignored;
        if (read(wake_fd_, &ignored, sizeof(ignored)) < 0 && errno != EAGAIN) {
          PYTRITON_LOG(ERROR, std::string("reading an event: ") + std::strerror(errno));
        }
      }
      for (size_t i = 0; i < busy.size(); ++i) {
        if (fds[i + 1].revents != 0) busy[i]->Process();
      }
    }
    const uint64_t polled_ns = NowNs();
    if (ready == 0 || polled_ns >= tick_ns) {
      for (auto& connection : busy) connection->Tick(polled_ns);
      tick_ns = polled_ns + kBusyTickNs;
    }
    lock.lock();
    polling_ = false;
    changed_.notify_all();
  }
  return true;
}

void Endpoint::WorkerLost(const std::string& what) {
  std::lock_guard<std::mutex> lock(lost_mutex_);
  last_loss_ = what;
  last_loss_ns_ = NowNs();
}

void Endpoint::TakeBack(std::unique_ptr<Batch> batch) {
  batch->StartAgain(NextBatchId());
  {
    std::lock_guard<std::mutex> lock(lost_mutex_);
    orphans_.push_back({std::move(batch), NowNs()});
    has_orphans_ = true;
  }
  Signal(kick_fd_);
}

void Endpoint::PutBack(Orphan orphan) {
  std::lock_guard<std::mutex> lock(lost_mutex_);
  orphans_.push_front(std::move(orphan));
  has_orphans_ = true;
}

void Endpoint::Refuse(Batch* batch, TRITONSERVER_Error_Code code, const std::string& text) const {
  batch->Fail(code, "model '" + model_.name + "' version " + std::to_string(model_.version) + ": " + text);
}

void Endpoint::NoWorker(Batch* batch, bool waited) {
  std::string loss;
  {
    std::lock_guard<std::mutex> lock(lost_mutex_);
    if (last_loss_ns_ != 0) {
      loss = " The last that was lost, " + std::to_string((NowNs() - last_loss_ns_) / kMillisecond) + " ms ago, was " +
             last_loss_;
    }
  }
  Refuse(
      batch, TRITONSERVER_ERROR_UNAVAILABLE,
      std::string("no worker is attached. ") + (waited ? "Waited " : "The request before this one has waited ") +
          std::to_string(settings_.attach_timeout_ms) + " ms for one at '" + settings_.endpoint +
          "'; is the process that serves this model alive?" + loss);
  gave_up_ns_ = NowNs();
}

bool Endpoint::Redeliver() {
  thread_local BatchSource scratch;
  for (;;) {
    Orphan orphan;
    {
      std::lock_guard<std::mutex> lock(lost_mutex_);
      has_orphans_ = !orphans_.empty();
      if (!has_orphans_) return true;
      orphan = std::move(orphans_.front());
      orphans_.pop_front();
    }
    std::shared_ptr<Connection> worker;
    bool any_attached = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      any_attached = AnyAttachedLocked();
      worker = ClaimIdleLocked();
    }
    if (!worker) {
      if (any_attached || NowNs() - orphan.since_ns < settings_.attach_timeout_ms * kMillisecond) {
        PutBack(std::move(orphan));
        return true;
      }
      Refuse(
          orphan.batch.get(), TRITONSERVER_ERROR_UNAVAILABLE,
          orphan.batch->loss + ". No other worker attached within " + std::to_string(settings_.attach_timeout_ms) +
              " ms to take it over");
      continue;
    }
    std::string error;
    switch (worker->Send(&orphan.batch, &scratch, &error)) {
      case Connection::SendResult::kSent:
        break;
      case Connection::SendResult::kRefused:
        Refuse(orphan.batch.get(), TRITONSERVER_ERROR_INVALID_ARG, error);
        break;
      case Connection::SendResult::kFailed:
        Refuse(orphan.batch.get(), TRITONSERVER_ERROR_UNAVAILABLE, error);
        break;
      case Connection::SendResult::kBusy:
        PutBack(std::move(orphan));
        return false;
      case Connection::SendResult::kClosed:
        PutBack(std::move(orphan));
        break;
    }
  }
}

void Endpoint::Execute(std::unique_ptr<Batch> batch) {
  thread_local BatchSource scratch;
  // Requests that wait behind each other must not add up their times: they come one by one, and the first has used up
  // the time of all.
  const uint64_t gave_up_ns = gave_up_ns_;
  const bool waits = gave_up_ns == 0 || NowNs() - gave_up_ns >= kBacklogNs;
  const uint64_t deadline_ns = NowNs() + (waits ? settings_.attach_timeout_ms * kMillisecond : 0);
  std::string error;
  while (batch) {
    std::shared_ptr<Connection> worker;
    bool any_attached = false;
    const auto claim = [&] {
      any_attached = AnyAttachedLocked();
      // What lost workers have left waits longer already.
      if (has_orphans_) return AnyIdleLocked();
      worker = ClaimIdleLocked();
      return worker != nullptr;
    };
    // As long as a worker is attached it answers sooner or later, or dies: only its absence has a limit here.
    while (!worker) {
      const bool found = WaitFor(claim, any_attached ? NowNs() + 100 * kMillisecond : deadline_ns);
      if (worker) break;
      if (has_orphans_ && !Redeliver()) WaitFor([] { return false; }, NowNs() + kNoRoomNs);
      if (!found && !any_attached && NowNs() >= deadline_ns) {
        NoWorker(batch.get(), waits);
        return;
      }
    }
    switch (worker->Send(&batch, &scratch, &error)) {
      case Connection::SendResult::kSent:
        break;
      case Connection::SendResult::kRefused:
        Refuse(batch.get(), TRITONSERVER_ERROR_INVALID_ARG, error);
        break;
      case Connection::SendResult::kFailed:
        Refuse(batch.get(), TRITONSERVER_ERROR_UNAVAILABLE, error);
        break;
      case Connection::SendResult::kBusy: {
        const uint32_t load = worker->load();
        WaitFor([&] { return worker->load() < load || worker->state() == ConnectionState::kClosed; },
                NowNs() + 100 * kMillisecond);
        continue;
      }
      case Connection::SendResult::kClosed:
        continue;
    }
    break;
  }
  batch.reset();

  // Wait at the end, not at the beginning: Triton forms the next batch before it calls again, and it shall do so when
  // a worker is there to take it, not before.
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!AnyIdleLocked()) {
      for (const auto& connection : connections_) {
        if (connection->state() != ConnectionState::kGreeting) ArmLocked(connection.get(), false);
      }
    }
  }
  WaitFor(
      [this] {
        return AnyIdleLocked() || std::none_of(connections_.begin(), connections_.end(), [](const auto& connection) {
                 return connection->load() != 0;
               });
      },
      kNever);
  if (has_orphans_) Redeliver();
  // Nobody waits any more: what is still in flight, and what idle workers say, is the background thread's.
  bool busy = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& connection : connections_) {
      ArmLocked(connection.get(), true);
      busy = busy || connection->load() != 0;
    }
  }
  // A lost worker's batch that was put back: the background thread may have looked while it was in our hands.
  if (has_orphans_ || (busy && !sweeping_)) Signal(kick_fd_);
}

}  // namespace pytriton
