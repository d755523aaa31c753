#include "loop.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <thread>

namespace pytriton::grpc {

bool Loop::Start() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wakeup_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (epoll_ < 0 || wakeup_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, wakeup_, &event) != 0) return false;
  // All signals are blocked, because the server waits for them in its own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool is_started = true;
  try {
    std::thread([this] { Run(); }).detach();
  } catch (const std::system_error&) {
    is_started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return is_started;
}

void Loop::Post(std::function<void()> task) {
  bool is_first = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_first = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  const uint64_t one = 1;
  // This can fail only if the event is set already, which wakes the thread as well.
  if (is_first) (void)!write(wakeup_, &one, sizeof(one));
}

Loop::Timer Loop::At(Clock::time_point time, std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Timer timer{time, ++last_};
  timers_.emplace(timer, std::move(task));
  return timer;
}

void Loop::Forget(Timer timer) {
  std::function<void()> task;  // destroyed without the lock, because that may take other locks
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = timers_.find(timer);
  if (found == timers_.end()) return;
  task = std::move(found->second);
  timers_.erase(found);
}

bool Loop::is_this_thread() const { return thread_.load(std::memory_order_relaxed) == pthread_self(); }

uint64_t Loop::Add(int fd, uint32_t events, std::shared_ptr<Pollable> pollable) {
  epoll_event event{};
  event.events = events;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    event.data.u64 = ++last_;
    pollables_[last_] = std::move(pollable);
  }
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0) return event.data.u64;
  const std::lock_guard<std::mutex> lock(mutex_);
  pollables_.erase(event.data.u64);
  return 0;
}

void Loop::Change(uint64_t number, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

void Loop::Remove(uint64_t number, int fd) {
  epoll_event none{};
  epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, &none);
  std::shared_ptr<Pollable> gone;  // destroyed without the lock, because that may take other locks
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pollables_.find(number);
  if (found == pollables_.end()) return;
  gone = std::move(found->second);
  pollables_.erase(found);
}

int Loop::TimeoutMs() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (timers_.empty()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first.first - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000));
}

void Loop::RunTimers() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!timers_.empty() && timers_.begin()->first.first <= Clock::now()) {
    const auto task = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    lock.unlock();
    task();
    lock.lock();
  }
}

void Loop::RunTasks() {
  uint64_t count = 0;
  (void)!read(wakeup_, &count, sizeof(count));
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const auto& task : tasks) task();
}

void Loop::Run() {
  pthread_setname_np(pthread_self(), "pytriton-grpc");
  thread_.store(pthread_self(), std::memory_order_relaxed);
  epoll_event events[64];
  for (;;) {
    const int count = epoll_wait(epoll_, events, 64, TimeoutMs());
    for (int i = 0; i < count; ++i) {
      const uint64_t number = events[i].data.u64;
      if (number == 0) {
        RunTasks();
        continue;
      }
      std::shared_ptr<Pollable> pollable;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = pollables_.find(number);
        if (found != pollables_.end()) pollable = found->second;
      }
      if (pollable != nullptr) pollable->OnEvents(events[i].events);
    }
    RunTimers();
  }
}

}  // namespace pytriton::grpc
