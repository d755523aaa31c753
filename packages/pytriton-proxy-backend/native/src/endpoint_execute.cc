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
// Without a worker: how long a batch stays before it is set aside, while Triton collects the requests that come for the
// next one, and for how long batches are set aside as they come then, which empties Triton's queue.
constexpr uint64_t kCollectNs = 20 * kMillisecond;
constexpr uint64_t kDrainNs = 5 * kMillisecond;

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
  if (orphan.batch->loss.empty()) {
    waiting_requests_ += orphan.batch->size();
    waiting_.push_front(std::move(orphan));
  } else {
    orphans_.push_front(std::move(orphan));
  }
  has_orphans_ = true;
}

bool Endpoint::SetAside(std::unique_ptr<Batch>* batch) {
  {
    std::lock_guard<std::mutex> lock(lost_mutex_);
    const uint64_t size = (*batch)->size();
    if (settings_.max_waiting != 0 && !waiting_.empty() && waiting_requests_ + size > settings_.max_waiting) return false;
    waiting_requests_ += size;
    const uint64_t came_ns = (*batch)->started_ns();
    waiting_.push_back({std::move(*batch), came_ns});
    has_orphans_ = true;
  }
  // From here on the background thread looks after it, which may be asleep.
  Signal(kick_fd_);
  return true;
}

bool Endpoint::TakeOrphan(Orphan* orphan) {
  std::lock_guard<std::mutex> lock(lost_mutex_);
  has_orphans_ = !orphans_.empty() || !waiting_.empty();
  if (!has_orphans_) return false;
  auto& from = orphans_.empty() ? waiting_ : orphans_;
  *orphan = std::move(from.front());
  from.pop_front();
  if (&from == &waiting_) waiting_requests_ -= orphan->batch->size();
  return true;
}

void Endpoint::GiveUpOrphans() {
  std::vector<Orphan> late;
  {
    std::lock_guard<std::mutex> lock(lost_mutex_);
    const uint64_t now_ns = NowNs();
    for (auto* from : {&orphans_, &waiting_}) {
      while (!from->empty() && now_ns - from->front().since_ns >= settings_.attach_timeout_ms * kMillisecond) {
        if (from == &waiting_) waiting_requests_ -= from->front().batch->size();
        late.push_back(std::move(from->front()));
        from->pop_front();
      }
    }
    has_orphans_ = !orphans_.empty() || !waiting_.empty();
  }
  for (auto& orphan : late) {
    if (orphan.batch->loss.empty()) {
      NoWorker(orphan.batch.get());
    } else {
      Refuse(
          orphan.batch.get(), TRITONSERVER_ERROR_UNAVAILABLE,
          orphan.batch->loss + ". No other worker attached within " + std::to_string(settings_.attach_timeout_ms) +
              " ms to take it over");
    }
  }
}

void Endpoint::Refuse(Batch* batch, TRITONSERVER_Error_Code code, const std::string& text) const {
  batch->Fail(code, "model '" + model_.name + "' version " + std::to_string(model_.version) + ": " + text);
}

void Endpoint::NoWorker(Batch* batch) {
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
      "no worker is attached. Waited " + std::to_string(settings_.attach_timeout_ms) + " ms for one at '" +
          settings_.endpoint + "'; is the process that serves this model alive?" + loss);
}

bool Endpoint::Redeliver() {
  thread_local BatchSource scratch;
  for (;;) {
    Orphan orphan;
    if (!TakeOrphan(&orphan)) return true;
    std::shared_ptr<Connection> worker;
    bool any_attached = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      any_attached = AnyAttachedLocked();
      worker = ClaimIdleLocked();
    }
    if (!worker) {
      PutBack(std::move(orphan));
      if (!any_attached) GiveUpOrphans();
      return true;
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
  // Each request may wait for a worker for a time of its own, which begins when it comes. Nobody tells when it came to
  // Triton's queue; so what finds no worker is taken out of that, and waits here.
  const uint64_t came_ns = batch->started_ns();
  const bool drains = came_ns < drain_until_ns_;
  const uint64_t limit_ns = came_ns + settings_.attach_timeout_ms * kMillisecond;
  uint64_t deadline_ns = drains ? came_ns : std::min(limit_ns, came_ns + kCollectNs);
  std::string error;
  while (batch) {
    std::shared_ptr<Connection> worker;
    bool any_attached = false;
    const auto claim = [&] {
      any_attached = AnyAttachedLocked();
      // What was set aside waits longer already.
      if (has_orphans_) return AnyIdleLocked();
      worker = ClaimIdleLocked();
      return worker != nullptr;
    };
    // As long as a worker is attached it answers sooner or later, or dies: only its absence has a limit here.
    while (!worker) {
      const bool found = WaitFor(claim, any_attached ? NowNs() + 100 * kMillisecond : deadline_ns);
      if (worker) break;
      if (has_orphans_ && !Redeliver()) WaitFor([] { return false; }, NowNs() + kNoRoomNs);
      if (found || any_attached || NowNs() < deadline_ns) continue;
      if (NowNs() >= limit_ns) {
        NoWorker(batch.get());
        return;
      }
      if (SetAside(&batch)) {
        if (!drains) drain_until_ns_ = NowNs() + kDrainNs;
        return;
      }
      // As many wait as Triton's queue may have: from now on it shall fill, and refuse what is too much.
      deadline_ns = std::min(limit_ns, NowNs() + kCollectNs);
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
