// A thread that waits for sockets and timers.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pytriton::grpc {

using Clock = std::chrono::steady_clock;

// Something for whose events a loop waits.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // Is called in the thread of the loop with the events that epoll reports.
  virtual void OnEvents(uint32_t events) = 0;
};

class Loop {
 public:
  // Starts the thread, which runs until the process ends. Returns false if the system has no more descriptors or
  // threads.
  bool Start();

  // Runs a task in the thread of the loop. May be called from any thread.
  void Post(std::function<void()> task);
  // Runs a task at a certain time. To be called in the thread of the loop only.
  using Timer = std::pair<Clock::time_point, uint64_t>;
  Timer At(Clock::time_point time, std::function<void()> task);
  // Forgets a task, unless it has begun. May be called from any thread, at any time.
  void Forget(Timer timer);
  bool is_this_thread() const;

  // Waits for events of a descriptor. Returns the number by which it is changed and removed; 0 if the system refuses.
  uint64_t Add(int fd, uint32_t events, std::shared_ptr<Pollable> pollable);
  // Waits for other events of the descriptor. May be called from any thread.
  void Change(uint64_t number, int fd, uint32_t events);
  // Removes a descriptor before it is closed. To be called in the thread of the loop only.
  void Remove(uint64_t number, int fd);

 private:
  void Run();
  int TimeoutMs();
  void RunTimers();
  void RunTasks();

  int epoll_ = -1;
  int wakeup_ = -1;
  std::atomic<uint64_t> thread_{0};
  std::mutex mutex_;  // guards what follows
  uint64_t last_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Pollable>> pollables_;
  std::vector<std::function<void()>> tasks_;
  std::map<Timer, std::function<void()>> timers_;
};

}  // namespace pytriton::grpc
