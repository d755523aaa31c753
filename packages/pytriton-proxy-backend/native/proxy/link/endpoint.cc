#include "endpoint.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>

#include "../text/errno_text.h"
#include "../triton/triton_util.h"

namespace pytriton {

namespace {

constexpr uint64_t kGreetingTimeoutNs = 5000 * kMillisecond;
// How often an endpoint with idle workers gives unused memory back.
constexpr uint64_t kIdleTickNs = 1000 * kMillisecond;
constexpr size_t kMaxConnections = 1024;
constexpr int kBindAttempts = 10;
// After a failed accept: how long to wait before the next one, and how long not to log the same failure again.
constexpr uint64_t kAcceptPauseNs = 100 * kMillisecond;
constexpr uint64_t kAcceptLogNs = 10000 * kMillisecond;

sockaddr_un Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  return address;
}

// Returns the process that listens on the path: 0 if there is none, -1 if it is unknown which.
pid_t ListenerOf(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return 0;
  const sockaddr_un address = Address(path);
  pid_t listener = 0;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    ucred peer{};
    socklen_t length = sizeof(peer);
    listener = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.pid > 0 ? peer.pid : -1;
  } else if (errno == EAGAIN) {
    listener = -1;
  }
  close(fd);
  return listener;
}

// How long a worker that has no room for a lost worker's batch is not tried again.
constexpr uint64_t kNoRoomNs = 5 * kMillisecond;

// What counts as a single caller that waits for each answer: so many batches in a row of one request each, each at
// least kPauseNs after the end of the one before. Then nothing else needs the processor while the worker is busy, and
// Execute polls for the answer for kLookNs before it sleeps.
constexpr uint64_t kPauseNs = 40 * 1000;
constexpr uint32_t kInRow = 8;
constexpr uint64_t kLookNs = 100 * 1000;

// Linux has EPOLLEXCLUSIVE since 4.5, but the headers may be older. A system without it wakes both waiting threads.
#ifndef EPOLLEXCLUSIVE
constexpr uint32_t EPOLLEXCLUSIVE = 1u << 28;
#endif

// The most requests that wait for a worker that sleeps, if Triton's queue has no limit of its own.
constexpr uint64_t kMostWaiting = 1000;

using Connections = std::vector<std::shared_ptr<Connection>>;

// Tells whether a predicate, such as a getter of the class, is true of any connection.
template <typename Is>
bool Any(const Connections& connections, const Is& is) {
  return std::any_of(
      connections.begin(), connections.end(), [&is](const auto& connection) { return std::invoke(is, *connection); });
}

// Tells whether any worker is attached that takes batches; one that is asleep does not.
bool AnyAttached(const Connections& connections) {
  return Any(connections, [](const Connection& each) { return each.takes_batches(); });
}

// Tells whether any worker is attached that serves the model, or will do so when it is woken.
bool AnyServing(const Connections& connections) {
  return Any(connections, [](const Connection& each) {
    return each.state() == ConnectionState::kAttached && !each.stands_in();
  });
}

// Returns the worker that may get a batch ahead, or null. If there are several workers, none gets one, because the next
// batch is for the one that is idle first.
Connection* OnlyWorker(const Connections& connections) {
  return connections.size() == 1 ? connections[0].get() : nullptr;
}

// Tells whether any worker can have a batch now.
bool AnyIdle(const Connections& connections) {
  const Connection* only = OnlyWorker(connections);
  return (only != nullptr && only->takes_ahead()) ||
         Any(connections, [](const Connection& each) { return each.idle(); });
}

bool AnyBusy(const Connections& connections) {
  return Any(connections, [](const Connection& each) { return each.load() != 0 || each.executing(); });
}

// Is held while the file of a socket is checked and changed, because an instance that ends and its successor in the
// same process do so at the same time.
std::mutex& FilesMutex() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}

bool Watch(int epoll_fd, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

Endpoint::Endpoint(ModelIdentity model, Settings settings) : model_(std::move(model)), settings_(std::move(settings)) {}

Endpoint::~Endpoint() {
  if (thread_.joinable()) {
    stopping_ = true;
    Signal(kick_fd_);
    thread_.join();
  }
  // This is done before workers are disconnected, because one that still finds the socket then assumes that the server
  // has died.
  {
    const std::lock_guard<std::mutex> lock(FilesMutex());
    struct stat status;
    // The successor of this instance may already listen at this path.
    if (inode_ != 0 && lstat(settings_.endpoint.c_str(), &status) == 0 && status.st_ino == inode_) {
      unlink(settings_.endpoint.c_str());
    }
  }
  for (const auto& connection : *connections_) connection->Close("the model is unloaded", true);
  calls_.reset();
  for (auto* left : {&orphans_, &waiting_}) {
    for (auto& orphan : *left) Refuse(orphan.batch.get(), TRITONSERVER_ERROR_UNAVAILABLE, "the model is unloaded");
  }
  for (int fd : {listen_fd_, epoll_fd_, idle_epoll_fd_, execute_epoll_fd_, kick_fd_, wake_fd_, timer_fd_}) {
    if (fd >= 0) close(fd);
  }
}

void Endpoint::Signal(int event_fd) {
  const uint64_t one = 1;
  if (write(event_fd, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    PYTRITON_LOG(ERROR, Errno("waking a thread"));
  }
}

void Endpoint::Drain(int event_fd) {
  uint64_t ignored;
  if (read(event_fd, &ignored, sizeof(ignored)) < 0 && errno != EAGAIN) {
    PYTRITON_LOG(ERROR, Errno("reading an event"));
  }
}

// ---- the socket, and the background thread --------------------------------------------------------------------------

bool Endpoint::MakeWay(std::string* error) const {
  const std::string& path = settings_.endpoint;
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) {
    if (!S_ISSOCK(status.st_mode)) {
      *error = "the endpoint '" + path + "' exists and is not a socket; remove it or choose another endpoint";
      return false;
    }
    const pid_t listener = ListenerOf(path);
    if (listener != 0 && listener != getpid()) {
      *error = "another server already listens on the endpoint '" + path + "'; give each server a folder of its own";
      return false;
    }
    // This file is left from a server that was killed; or it belongs to the instance that Triton will replace by this
    // one, whose workers come here when it has answered its last request and has ended.
    unlink(path.c_str());
  }
  return true;
}

bool Endpoint::Bind(std::string* error) {
  const std::string& path = settings_.endpoint;
  const std::lock_guard<std::mutex> lock(FilesMutex());
  const sockaddr_un address = Address(path);
  listen_fd_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listen_fd_ < 0) {
    *error = Errno("socket");
    return false;
  }
  // Permissions that are set on the descriptor before bind are those of the new file, so nobody else can connect before
  // the chmod.
  bool bound = fchmod(listen_fd_, 0600) == 0;
  // A model with the same path in another library, and so with another mutex, may bind it in between.
  for (int left = kBindAttempts; bound; --left) {
    if (!MakeWay(error)) return false;
    if (bind(listen_fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) break;
    bound = errno == EADDRINUSE && left > 1;
  }
  if (!bound) {
    *error = "the endpoint '" + path + "' could not be made: " + std::strerror(errno) +
             ". Its folder must exist and be writable by the server's user";
    return false;
  }
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) inode_ = status.st_ino;
  // Such a model may have replaced the file already, which is why a missing one is no error.
  if ((chmod(path.c_str(), 0600) != 0 && errno != ENOENT) || listen(listen_fd_, 64) != 0) {
    *error = "the endpoint '" + path + "' could not be made ready: " + std::strerror(errno);
    return false;
  }
  return true;
}

bool Endpoint::Listen(std::string* error) {
  if (!Bind(error)) return false;
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  idle_epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  execute_epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  kick_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  timer_fd_ = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
  if (epoll_fd_ < 0 || idle_epoll_fd_ < 0 || execute_epoll_fd_ < 0 || kick_fd_ < 0 || wake_fd_ < 0 || timer_fd_ < 0 ||
      !Watch(epoll_fd_, listen_fd_, EPOLLIN) || !Watch(epoll_fd_, kick_fd_, EPOLLIN) ||
      !Watch(idle_epoll_fd_, epoll_fd_, EPOLLIN) || !Watch(execute_epoll_fd_, wake_fd_, EPOLLIN) ||
      !Watch(execute_epoll_fd_, timer_fd_, EPOLLIN)) {
    *error = Errno("epoll");
    return false;
  }
  last_end_ns_ = NowNs();
  thread_ = std::thread([this] { Run(); });
  return true;
}

void Endpoint::UseRequest(
    uint64_t batch, uint32_t index, const std::function<void(TRITONBACKEND_Request*)>& use) {
  const auto all = connections();
  for (const auto& connection : *all) {
    if (connection->UseRequest(batch, index, use)) return;
  }
}

bool Endpoint::IsReady() {
  std::lock_guard<std::mutex> lock(mutex_);
  return AnyServing(*connections_) || NowNs() - last_end_ns_ < kReadyGraceNs;
}

std::shared_ptr<const Endpoint::Connections> Endpoint::connections() {
  std::lock_guard<std::mutex> lock(mutex_);
  return connections_;
}

// A message wakes the Execute that polls, or the background thread if none polls: of several epolls that wait
// exclusively the kernel wakes the first one that has a waiter, in the order in which they were added here. So nobody
// has to switch between them. The end of a socket wakes both. An Execute that has sent a batch and does not wait yet
// would be passed over, too; `Run` deals with that.
bool Endpoint::WatchWorker(int fd) {
  return Watch(execute_epoll_fd_, fd, EPOLLIN | EPOLLEXCLUSIVE) && Watch(idle_epoll_fd_, fd, EPOLLIN | EPOLLEXCLUSIVE);
}

void Endpoint::UnwatchWorker(const Connection& connection) {
  // The Execute that polls has already removed a closed connection itself.
  epoll_ctl(execute_epoll_fd_, EPOLL_CTL_DEL, connection.fd(), nullptr);
  epoll_ctl(idle_epoll_fd_, EPOLL_CTL_DEL, connection.fd(), nullptr);
  if (connection.process_fd() >= 0) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection.process_fd(), nullptr);
}

void Endpoint::WatchListener(bool watched) {
  epoll_event event{};
  event.events = watched ? uint32_t{EPOLLIN} : 0u;
  event.data.fd = listen_fd_;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, listen_fd_, &event) != 0) {
    PYTRITON_LOG(ERROR, Errno("watching for workers"));
  }
}

void Endpoint::Accept() {
  for (;;) {
    const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        // Most likely the process has no descriptor left. The listener stays readable, so it is not watched for a
        // while.
        const uint64_t now_ns = NowNs();
        if (accept_logged_ns_ == 0 || now_ns - accept_logged_ns_ >= kAcceptLogNs) {
          accept_logged_ns_ = now_ns;
          PYTRITON_LOG(ERROR, "model '" + model_.name + "': " + Errno("accepting a worker") +
                                  "; trying again, workers wait meanwhile");
        }
        accept_again_ns_ = now_ns + kAcceptPauseNs;
        WatchListener(false);
      }
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (connections_->size() >= kMaxConnections) {
      PYTRITON_LOG(ERROR, "model '" + model_.name + "': more than " + std::to_string(kMaxConnections) +
                              " workers; one more is turned away");
      close(fd);
      continue;
    }
    if (!WatchWorker(fd)) {
      PYTRITON_LOG(ERROR, "model '" + model_.name + "': " + Errno("watching a worker"));
      close(fd);
      continue;
    }
    auto connections = std::make_shared<Connections>(*connections_);
    connections->push_back(std::make_shared<Connection>(fd, model_, settings_, static_cast<ConnectionOwner*>(this)));
    const int process_fd = connections->back()->process_fd();
    if (process_fd >= 0 && !Watch(epoll_fd_, process_fd, EPOLLIN)) {
      PYTRITON_LOG(ERROR, "model '" + model_.name + "': " + Errno("watching the process of a worker"));
    }
    connections_ = std::move(connections);
  }
}

void Endpoint::Sweep(uint64_t now_ns) {
  const auto all = connections();
  for (const auto& connection : *all) {
    if (connection->state() == ConnectionState::kGreeting) {
      if (now_ns - connection->accepted_ns() > kGreetingTimeoutNs) {
        connection->Close("it did not greet within " + std::to_string(kGreetingTimeoutNs / kMillisecond) + " ms", false);
      }
      continue;
    }
    connection->Process();
    connection->Tick(now_ns);
  }
}

bool Endpoint::Attend(bool attends_workers, int timeout_ms, bool* sweep) {
  epoll_event events[32];
  int count = epoll_wait(attends_workers ? idle_epoll_fd_ : epoll_fd_, events, 32, timeout_ms);
  if (count < 0 && errno != EINTR) {
    PYTRITON_LOG(ERROR, "model '" + model_.name + "': " + Errno("epoll_wait") + "; no worker can attach any more");
    return false;
  }
  *sweep = count <= 0;
  bool has_others = !attends_workers;
  const auto all = connections();
  for (int i = 0; attends_workers && i < count; ++i) {
    has_others = has_others || events[i].data.fd == epoll_fd_;
    for (const auto& connection : *all) {
      if (connection->fd() == events[i].data.fd) connection->Process();
    }
  }
  if (attends_workers && has_others) count = epoll_wait(epoll_fd_, events, 32, 0);
  for (int i = 0; has_others && i < count; ++i) {
    const int fd = events[i].data.fd;
    if (fd == kick_fd_) {
      Drain(kick_fd_);
      if (stopping_) return false;
      *sweep = true;
    } else if (fd == listen_fd_) {
      Accept();
    } else {
      for (const auto& connection : *all) {
        if (connection->process_fd() == fd) connection->ProcessEnded();
      }
    }
  }
  return true;
}

void Endpoint::Run() {
  uint64_t next_sweep_ns = kNever;
  uint64_t seen_executed = 0;
  bool attends_workers = true;
  for (;;) {
    int timeout_ms = -1;
    const uint64_t due_ns = std::min({next_sweep_ns, accept_again_ns_, late_ends_.SendDue(NowNs())});
    if (due_ns != kNever) {
      const uint64_t now_ns = NowNs();
      timeout_ms = due_ns <= now_ns ? 0 : static_cast<int>((due_ns - now_ns) / kMillisecond) + 1;
    }
    bool sweep;
    if (!Attend(attends_workers, timeout_ms, &sweep)) return;
    const uint64_t now_ns = NowNs();
    if (accept_again_ns_ <= now_ns) {
      accept_again_ns_ = kNever;
      WatchListener(true);
    }
    sweep = sweep || next_sweep_ns <= now_ns;
    if (sweep) Sweep(now_ns);
    if (has_orphans_) Redeliver();
    bool polling;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      RemoveClosedLocked(now_ns);
      // While an Execute polls, it looks after the batches in flight.
      polling = polling_;
      const bool greets = Any(
          *connections_, [](const Connection& each) { return each.state() == ConnectionState::kGreeting; });
      const bool busy = has_orphans_ || (!polling && AnyBusy(*connections_)) || greets;
      // While Executes follow each other and leave nothing in flight, they read the messages themselves: if this thread
      // watched too, an answer that comes before its Execute waits for it would wake this thread for nothing. Messages
      // that come in between are read at the next sweep.
      const uint64_t executed = executed_;
      attends_workers = busy || executed == seen_executed;
      if (sweep) seen_executed = executed;
      // A sweep stays due however many messages come meanwhile, because a stream may never pause. Workers that are
      // asleep need no sweep, because their sockets are watched here.
      const bool asleep = attends_workers && std::all_of(connections_->begin(), connections_->end(), [](const auto& each) {
        return each->is_asleep();
      });
      const bool nothing = !busy && (connections_->empty() || asleep);
      const uint64_t next_ns =
          nothing ? kNever : now_ns + (busy || !attends_workers ? kBusyTickNs : kIdleTickNs);
      next_sweep_ns = sweep || nothing ? next_ns : std::min(next_sweep_ns, next_ns);
      sweeping_ = busy;
      changed_.notify_all();
    }
    // This is needed after a sweep, too: the sweep may have read the answer that an Execute waits for, whose poll would
    // not end by itself.
    if (polling) Signal(wake_fd_);
  }
}

void Endpoint::RemoveClosedLocked(uint64_t now_ns) {
  const auto is_closed = [](const auto& connection) { return connection->state() == ConnectionState::kClosed; };
  if (std::none_of(connections_->begin(), connections_->end(), is_closed)) return;
  auto left = std::make_shared<Connections>();
  for (const auto& connection : *connections_) {
    if (is_closed(connection)) {
      UnwatchWorker(*connection);
    } else {
      left->push_back(connection);
    }
  }
  connections_ = std::move(left);
  last_end_ns_ = now_ns;
}

// ---- who gets which batch, and who waits for what -------------------------------------------------------------------

std::shared_ptr<Connection> Endpoint::ClaimIdle(const Connections& connections) {
  const size_t count = connections.size();
  for (;;) {
    // Takes the worker with the fewest batches, beginning with another one each time, so that a slow or stopped worker
    // does not collect more batches than the other ones.
    const size_t begin = next_.load(std::memory_order_relaxed);
    size_t best = count;
    uint32_t least = UINT32_MAX;
    for (size_t i = 0; i < count && least != 0; ++i) {
      const size_t place = (begin + i) % count;
      const uint32_t load = connections[place]->load();
      if (load >= least || !connections[place]->idle()) continue;
      best = place;
      least = load;
    }
    if (best == count) {
      Connection* only = OnlyWorker(connections);
      return only != nullptr && only->ClaimAhead() ? connections[0] : nullptr;
    }
    if (!connections[best]->Claim()) continue;  // another Execute has claimed it meanwhile
    next_.store(best + 1, std::memory_order_relaxed);
    return connections[best];
  }
}

void Endpoint::SetTimer(const Connections& connections) {
  const Connection* only = OnlyWorker(connections);
  const uint64_t due_ns = only != nullptr ? only->nearly_done_ns() : kNever;
  if (due_ns == kNever || due_ns == timer_ns_) return;
  timer_ns_ = due_ns;
  itimerspec time{};
  time.it_value.tv_sec = static_cast<time_t>(due_ns / 1000000000u);
  time.it_value.tv_nsec = static_cast<long>(due_ns % 1000000000u);
  if (timerfd_settime(timer_fd_, TFD_TIMER_ABSTIME, &time, nullptr) != 0) {
    PYTRITON_LOG(ERROR, "model '" + model_.name + "': " + Errno("timerfd_settime"));
  }
}

void Endpoint::Poll(const Connections& connections, uint64_t timeout_ns, uint64_t* tick_ns) {
  SetTimer(connections);
  epoll_event events[16];
  const int count = epoll_wait(execute_epoll_fd_, events, 16, static_cast<int>(timeout_ns / kMillisecond) + 1);
  for (int i = 0; i < count; ++i) {
    const int fd = events[i].data.fd;
    if (fd == wake_fd_ || fd == timer_fd_) {
      Drain(fd);
      continue;
    }
    // A worker that is not in this list has attached since; its socket stays readable until it is in the list.
    for (const auto& connection : connections) {
      if (connection->fd() != fd) continue;
      connection->Process();
      // Its socket would stay readable until the background thread removes the connection.
      if (connection->state() == ConnectionState::kClosed) epoll_ctl(execute_epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
      break;
    }
  }
  const uint64_t now_ns = NowNs();
  if (count > 0 && now_ns < *tick_ns) return;
  for (const auto& connection : connections) {
    if (connection->load() != 0) connection->Tick(now_ns);
  }
  *tick_ns = now_ns + kBusyTickNs;
}

template <typename Done>
bool Endpoint::WaitFor(uint64_t deadline_ns, const Done& done) {
  std::unique_lock<std::mutex> lock(mutex_);
  uint64_t tick_ns = 0;
  while (!done(*connections_)) {
    const uint64_t now_ns = NowNs();
    if (now_ns >= deadline_ns) return false;
    const uint64_t wait_ns = std::min(deadline_ns - now_ns, kBusyTickNs);
    if (polling_) {
      changed_.wait_for(lock, std::chrono::nanoseconds(wait_ns));
      continue;
    }
    if (tick_ns == 0) tick_ns = now_ns + kBusyTickNs;
    polling_ = true;
    const auto connections = connections_;
    lock.unlock();
    Poll(*connections, wait_ns, &tick_ns);
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

bool Endpoint::SetAside(std::unique_ptr<Batch>* batch, uint64_t most) {
  {
    std::lock_guard<std::mutex> lock(lost_mutex_);
    const uint64_t size = (*batch)->size();
    if (most != 0 && !waiting_.empty() && waiting_requests_ + size > most) return false;
    waiting_requests_ += size;
    const uint64_t came_ns = (*batch)->started_ns();
    waiting_.push_back({std::move(*batch), came_ns});
    has_orphans_ = true;
  }
  // From here on the background thread looks after the batch; it may be asleep, so it is woken.
  Signal(kick_fd_);
  return true;
}

void Endpoint::Line(std::vector<std::unique_ptr<Batch>>* parts) {
  std::lock_guard<std::mutex> lock(lost_mutex_);
  for (auto& part : *parts) {
    waiting_requests_ += part->size();
    const uint64_t came_ns = part->started_ns();
    waiting_.push_back({std::move(part), came_ns});
  }
  has_orphans_ = true;
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
  batch->Fail(code, model_.Begin() + text);
}

void Endpoint::SetAbsence(const std::string& reason) {
  std::lock_guard<std::mutex> lock(lost_mutex_);
  absence_ = reason;
}

void Endpoint::Wake(const Connections& connections) {
  for (const auto& connection : connections) {
    if (connection->can_wake()) connection->Wake();
  }
}

void Endpoint::NoWorker(Batch* batch) {
  std::string loss;
  std::string reason = "; is the process that serves this model alive?";
  if (Any(*connections(), &Connection::is_asleep)) {
    reason =
        ", while its workers wake from their sleep: their start takes longer, or fails, which the log of the process "
        "that serves this model says. Allow more time with attach_timeout_s, or send the request again.";
  }
  {
    std::lock_guard<std::mutex> lock(lost_mutex_);
    if (!absence_.empty()) reason = ": " + absence_ + ".";
    if (last_loss_ns_ != 0) {
      loss = " The last that was lost, " + std::to_string((NowNs() - last_loss_ns_) / kMillisecond) + " ms ago, was " +
             last_loss_;
    }
  }
  Refuse(
      batch, TRITONSERVER_ERROR_UNAVAILABLE,
      "no worker is attached. Waited " + std::to_string(settings_.attach_timeout_ms) + " ms for one at '" +
          settings_.endpoint + "'" + reason + loss);
}

bool Endpoint::Redeliver() {
  thread_local BatchSource scratch;
  for (;;) {
    Orphan orphan;
    if (!TakeOrphan(&orphan)) return true;
    const auto all = connections();
    const auto worker = ClaimIdle(*all);
    if (!worker) {
      PutBack(std::move(orphan));
      if (!AnyAttached(*all)) {
        Wake(*all);
        GiveUpOrphans();
      }
      return true;
    }
    std::string error;
    switch (worker->Send(&orphan.batch, &scratch, &error)) {
      case Connection::SendResult::kSent:
      case Connection::SendResult::kAnswered:
        break;
      case Connection::SendResult::kRefused:
        if (auto half = orphan.batch->SplitOff(NextBatchId())) {
          const uint64_t since_ns = orphan.since_ns;
          PutBack(std::move(orphan));
          PutBack({std::move(half), since_ns});
        } else {
          Refuse(orphan.batch.get(), TRITONSERVER_ERROR_INVALID_ARG, error);
        }
        break;
      case Connection::SendResult::kFailed:
        Refuse(orphan.batch.get(), TRITONSERVER_ERROR_UNAVAILABLE, error);
        break;
      case Connection::SendResult::kBusy:
      case Connection::SendResult::kUnread:
        PutBack(std::move(orphan));
        return false;
      case Connection::SendResult::kClosed:
        PutBack(std::move(orphan));
        break;
    }
  }
}

void Endpoint::LookForAnswer(Connection* worker) {
  const uint64_t until_ns = NowNs() + kLookNs;
  // Yields, so that other threads that want to run go first.
  for (uint64_t now_ns = 0; worker->load() != 0 && now_ns < until_ns; now_ns = NowNs()) {
    sched_yield();
    worker->Process();
  }
}

void Endpoint::Execute(std::unique_ptr<Batch> batch) {
  thread_local BatchSource scratch;
  if (cache_) {
    // Requests that the cache can answer need no worker, and do not wait for one.
    batch->cache = cache_.get();
    batch->Collect(&scratch);
    if (batch->finished()) return;
  }
  if (settings_.cost_limit != 0) {
    // The last part goes on as every batch does; those before it are served first.
    const uint64_t overhead =
        settings_.cost_overhead != 0 ? settings_.cost_overhead : cost_pace_.overhead(settings_.cost_limit);
    auto parts = batch->CutByCost(settings_, overhead, &scratch, [this] { return NextBatchId(); });
    if (batch->finished()) return;
    if (!parts.empty()) Line(&parts);
  }
  executed_.fetch_add(1, std::memory_order_relaxed);
  const bool lone = batch->size() == 1 && batch->started_ns() > returned_ns_ + kPauseNs;
  lone_ = lone ? lone_ + 1 : 0;
  uint64_t sent_ns = 0;
  // Each request may wait for a worker for a certain time, which begins when the request comes. But nobody knows when
  // it came to Triton's queue. So batches without a worker are taken out of that queue and wait here.
  const uint64_t came_ns = batch->started_ns();
  const bool drains = came_ns < drain_until_ns_;
  const uint64_t limit_ns = came_ns + settings_.attach_timeout_ms * kMillisecond;
  uint64_t deadline_ns = drains ? came_ns : std::min(limit_ns, came_ns + kCollectNs);
  std::string error;
  while (batch) {
    std::shared_ptr<Connection> worker;
    bool any_attached = false;
    const auto claim = [&](const Connections& all) {
      any_attached = AnyAttached(all);
      // Workers that sleep are told at once.
      if (!any_attached && Any(all, &Connection::can_wake)) return true;
      // Batches that were set aside have waited longer, and go first.
      if (has_orphans_) return AnyIdle(all);
      worker = ClaimIdle(all);
      return worker != nullptr;
    };
    // An attached worker answers sooner or later, or dies, so this wait has a limit only while no worker is attached.
    while (!worker) {
      const bool found = WaitFor(any_attached ? NowNs() + 100 * kMillisecond : deadline_ns, claim);
      if (worker) break;
      if (!any_attached) Wake(*connections());
      if (has_orphans_ && !Redeliver()) WaitFor(NowNs() + kNoRoomNs, [](const Connections&) { return false; });
      if (found || any_attached || NowNs() < deadline_ns) continue;
      if (NowNs() >= limit_ns) {
        NoWorker(batch.get());
        return;
      }
      const bool asleep = Any(*connections(), &Connection::is_asleep);
      if (SetAside(&batch, settings_.max_waiting != 0 || !asleep ? settings_.max_waiting : kMostWaiting)) {
        if (!drains) drain_until_ns_ = NowNs() + kDrainNs;
        return;
      }
      if (settings_.max_waiting == 0) {
        // Triton's queue has no limit, so nobody else would refuse the request.
        Refuse(
            batch.get(), TRITONSERVER_ERROR_UNAVAILABLE,
            "its workers sleep, and as many requests as may, " + std::to_string(kMostWaiting) +
                ", wait already for them to wake. Send it again a little later");
        return;
      }
      // As many requests wait here as Triton's queue may hold. From now on that queue fills up, and Triton refuses what
      // exceeds its limit.
      deadline_ns = std::min(limit_ns, NowNs() + kCollectNs);
    }
    switch (worker->Send(&batch, &scratch, &error)) {
      case Connection::SendResult::kSent:
        sent_ns = NowNs();
        if (lone_ > kInRow && answered_soon_) LookForAnswer(worker.get());
        break;
      case Connection::SendResult::kAnswered:
        break;
      case Connection::SendResult::kRefused:
        // The batch is too large for the arena. Its halves may fit; only a request that does not fit by itself gets an
        // error.
        if (auto half = batch->SplitOff(NextBatchId())) {
          PutBack({std::move(half), came_ns});
          continue;
        }
        Refuse(batch.get(), TRITONSERVER_ERROR_INVALID_ARG, error);
        break;
      case Connection::SendResult::kFailed:
        Refuse(batch.get(), TRITONSERVER_ERROR_UNAVAILABLE, error);
        break;
      case Connection::SendResult::kBusy: {
        const uint32_t load = worker->load();
        WaitFor(NowNs() + 100 * kMillisecond, [&](const Connections&) {
          return worker->load() < load || worker->state() == ConnectionState::kClosed;
        });
        continue;
      }
      case Connection::SendResult::kUnread:
        WaitFor(NowNs() + 100 * kMillisecond, [&](const Connections&) {
          return worker->has_room() || worker->state() == ConnectionState::kClosed;
        });
        continue;
      case Connection::SendResult::kClosed:
        continue;
    }
    break;
  }
  batch.reset();

  // This waits at the end of Execute and not at its beginning, because Triton forms the next batch before it calls
  // Execute: it should form it only when a worker is there to take it.
  bool busy = false;
  WaitFor(kNever, [&busy](const Connections& all) {
    busy = AnyBusy(all);
    return !busy || AnyIdle(all);
  });
  if (has_orphans_) {
    Redeliver();
    busy = true;
  }
  // From here on the background thread looks after what is in flight; it may be asleep. The same goes for a batch that
  // a lost worker gave back, which that thread may have missed while this function held it.
  if (has_orphans_ || (busy && !sweeping_)) Signal(kick_fd_);
  const uint64_t now_ns = NowNs();
  // If a worker takes several batches, Execute returns before the answer has come.
  if (lone && sent_ns != 0) answered_soon_ = !busy && now_ns - sent_ns < kLookNs;
  returned_ns_ = now_ns;
}

}  // namespace pytriton
