#include "endpoint.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "triton_util.h"

namespace pytriton {

namespace {

constexpr uint64_t kMillisecond = 1000 * 1000;
constexpr uint64_t kNever = UINT64_MAX;
constexpr uint64_t kGreetingTimeoutNs = 5000 * kMillisecond;
// While requests are in flight: how late a cancellation may be seen.
constexpr uint64_t kBusyTickNs = 20 * kMillisecond;
// While workers are attached and idle: how late memory goes back.
constexpr uint64_t kIdleTickNs = 1000 * kMillisecond;
constexpr size_t kMaxConnections = 1024;

std::string Errno(const char* call) { return std::string(call) + ": " + std::strerror(errno); }

sockaddr_un Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  return address;
}

// The process that listens on the path: 0 if none does, -1 if it cannot be told which.
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

}  // namespace

Endpoint::Endpoint(ModelIdentity model, Settings settings) : model_(std::move(model)), settings_(std::move(settings)) {}

Endpoint::~Endpoint() {
  if (thread_.joinable()) {
    stopping_ = true;
    Signal(kick_fd_);
    thread_.join();
  }
  for (auto& connection : connections_) connection->Close("the model is unloaded", true);
  connections_.clear();
  struct stat status;
  // The instance that follows this one may listen in its place already.
  if (inode_ != 0 && lstat(settings_.endpoint.c_str(), &status) == 0 && status.st_ino == inode_) {
    unlink(settings_.endpoint.c_str());
  }
  for (int fd : {listen_fd_, epoll_fd_, kick_fd_, wake_fd_}) {
    if (fd >= 0) close(fd);
  }
}

void Endpoint::Signal(int event_fd) {
  const uint64_t one = 1;
  if (write(event_fd, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    PYTRITON_LOG(ERROR, Errno("waking a thread"));
  }
}

bool Endpoint::Bind(std::string* error) {
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
    // Left by a server that was killed; or it is the instance that Triton is about to replace by this one, whose
    // workers will come here when it has answered its last request and is gone.
    unlink(path.c_str());
  }
  const sockaddr_un address = Address(path);
  listen_fd_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listen_fd_ < 0) {
    *error = Errno("socket");
    return false;
  }
  // Nobody else may connect between bind and chmod: permissions set on the descriptor are those the file is born with.
  if (fchmod(listen_fd_, 0600) != 0 ||
      bind(listen_fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    *error = "the endpoint '" + path + "' could not be made: " + std::strerror(errno) +
             ". Its folder must exist and be writable by the server's user";
    return false;
  }
  if (lstat(path.c_str(), &status) == 0) inode_ = status.st_ino;
  if (chmod(path.c_str(), 0600) != 0 || listen(listen_fd_, 64) != 0) {
    *error = "the endpoint '" + path + "' could not be made ready: " + std::strerror(errno);
    return false;
  }
  return true;
}

bool Endpoint::Listen(std::string* error) {
  if (!Bind(error)) return false;
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  kick_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event listen_event{};
  listen_event.events = EPOLLIN;
  listen_event.data.fd = listen_fd_;
  epoll_event kick_event{};
  kick_event.events = EPOLLIN;
  kick_event.data.fd = kick_fd_;
  if (epoll_fd_ < 0 || kick_fd_ < 0 || wake_fd_ < 0 ||
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, listen_fd_, &listen_event) != 0 ||
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, kick_fd_, &kick_event) != 0) {
    *error = Errno("epoll");
    return false;
  }
  thread_ = std::thread([this] { Run(); });
  return true;
}

void Endpoint::ArmLocked(Connection* connection, bool armed) {
  if (connection->armed == armed || connection->state() == ConnectionState::kClosed) return;
  connection->armed = armed;
  epoll_event event{};
  event.events = EPOLLRDHUP | (armed ? uint32_t{EPOLLIN} : 0u);
  event.data.fd = connection->fd();
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, connection->fd(), &event) != 0) {
    PYTRITON_LOG(ERROR, Errno("watching a worker"));
  }
}

void Endpoint::Accept() {
  for (;;) {
    const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        PYTRITON_LOG(ERROR, "model '" + model_.name + "': " + Errno("accepting a worker"));
        // Out of descriptors, most likely: the listening socket stays readable, so do not spin on it.
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (connections_.size() >= kMaxConnections) {
      PYTRITON_LOG(ERROR, "model '" + model_.name + "': more than " + std::to_string(kMaxConnections) +
                              " workers; one more is turned away");
      close(fd);
      continue;
    }
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.fd = fd;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
      PYTRITON_LOG(ERROR, "model '" + model_.name + "': " + Errno("watching a worker"));
      close(fd);
      continue;
    }
    connections_.push_back(std::make_shared<Connection>(fd, model_, settings_));
  }
}

void Endpoint::Sweep(uint64_t now_ns) {
  Connections all;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    all = connections_;
  }
  for (auto& connection : all) {
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

void Endpoint::Run() {
  uint64_t next_sweep_ns = kNever;
  for (;;) {
    int timeout_ms = -1;
    if (next_sweep_ns != kNever) {
      const uint64_t now_ns = NowNs();
      timeout_ms = next_sweep_ns <= now_ns ? 0 : static_cast<int>((next_sweep_ns - now_ns) / kMillisecond) + 1;
    }
    epoll_event events[32];
    const int count = epoll_wait(epoll_fd_, events, 32, timeout_ms);
    if (count < 0 && errno != EINTR) {
      PYTRITON_LOG(ERROR, "model '" + model_.name + "': " + Errno("epoll_wait") + "; no worker can attach any more");
      return;
    }
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == kick_fd_) {
        uint64_t ignored;
        if (read(kick_fd_, &ignored, sizeof(ignored)) < 0 && errno != EAGAIN) {
          PYTRITON_LOG(ERROR, Errno("reading an event"));
        }
        if (stopping_) return;
        next_sweep_ns = 0;
        continue;
      }
      if (fd == listen_fd_) {
        Accept();
        continue;
      }
      std::shared_ptr<Connection> connection;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto& candidate : connections_) {
          if (candidate->fd() == fd) connection = candidate;
        }
      }
      if (!connection) continue;
      connection->Process();
    }
    const uint64_t now_ns = NowNs();
    const bool sweep = count <= 0 || next_sweep_ns <= now_ns;
    if (sweep) Sweep(now_ns);
    bool waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      bool busy = false;
      for (auto it = connections_.begin(); it != connections_.end();) {
        if ((*it)->state() == ConnectionState::kClosed) {
          epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, (*it)->fd(), nullptr);
          it = connections_.erase(it);
          continue;
        }
        busy = busy || ((*it)->load() != 0 && (*it)->armed) || (*it)->state() == ConnectionState::kGreeting;
        ++it;
      }
      // A sweep that is due stays due, however many messages come meanwhile: a stream may never let up.
      const uint64_t next_ns = connections_.empty() ? kNever : now_ns + (busy ? kBusyTickNs : kIdleTickNs);
      next_sweep_ns = sweep || connections_.empty() ? next_ns : std::min(next_sweep_ns, next_ns);
      sweeping_ = busy;
      waiting = polling_;
      changed_.notify_all();
    }
    if (waiting && count > 0) Signal(wake_fd_);
  }
}

std::shared_ptr<Connection> Endpoint::ClaimIdleLocked() {
  for (size_t i = 0; i < connections_.size(); ++i) {
    const size_t place = (next_ + i) % connections_.size();
    if (!connections_[place]->idle()) continue;
    next_ = place + 1;
    connections_[place]->Claim();
    return connections_[place];
  }
  return nullptr;
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
          PYTRITON_LOG(ERROR, Errno("reading an event"));
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

void Endpoint::Execute(std::unique_ptr<Batch> batch) {
  thread_local BatchSource scratch;
  const uint64_t deadline_ns = NowNs() + settings_.attach_timeout_ms * kMillisecond;
  std::string error;
  while (batch) {
    std::shared_ptr<Connection> worker;
    bool any_attached = false;
    const auto claim = [&] {
      any_attached = std::any_of(connections_.begin(), connections_.end(), [](const auto& connection) {
        return connection->state() == ConnectionState::kAttached;
      });
      worker = ClaimIdleLocked();
      return worker != nullptr;
    };
    // As long as a worker is attached it answers sooner or later, or dies: only its absence has a limit here.
    while (!worker) {
      const bool claimed = WaitFor(claim, any_attached ? NowNs() + 100 * kMillisecond : deadline_ns);
      if (claimed) break;
      if (!any_attached && NowNs() >= deadline_ns) {
        batch->Fail(
            TRITONSERVER_ERROR_UNAVAILABLE,
            "model '" + model_.name + "' version " + std::to_string(model_.version) +
                ": no worker is attached. Waited " + std::to_string(settings_.attach_timeout_ms) +
                " ms for one at '" + settings_.endpoint + "'; is the process that serves this model alive?");
        return;
      }
    }
    switch (worker->Send(&batch, &scratch, &error)) {
      case Connection::SendResult::kSent:
        break;
      case Connection::SendResult::kRefused:
        batch->Fail(
            TRITONSERVER_ERROR_INVALID_ARG,
            "model '" + model_.name + "' version " + std::to_string(model_.version) + ": " + error);
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
  // Nobody waits any more: what is still in flight, and what idle workers say, is the background thread's.
  bool busy = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& connection : connections_) {
      ArmLocked(connection.get(), true);
      busy = busy || connection->load() != 0;
    }
  }
  if (busy && !sweeping_) Signal(kick_fd_);
}

}  // namespace pytriton
