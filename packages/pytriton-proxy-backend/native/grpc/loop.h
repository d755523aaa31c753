// A thread that waits at sockets and clocks.
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

// What a loop waits for.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // Called in the thread of the loop, with what epoll reports.
  virtual void OnEvents(uint32_t events) = 0;
};

class Loop {
 public:
  // Starts the thread; it runs until the process ends. False where the system has no more descriptors or threads.
  bool Start();

  // Runs a task in the thread of the loop; from any thread.
  void Post(std::function<void()> task);
  // Has the loop run a task at a time; called in its thread only.
  using Timer = std::pair<Clock::time_point, uint64_t>;
  Timer At(Clock::time_point time, std::function<void()> task);
  // Forgets a task, unless it has begun by now; from any thread, and at any time.
  void Forget(Timer timer);
  bool is_this_thread() const;

  // Waits at a descriptor. Returns the number by which it is changed and forgotten; 0 where the system refuses.
  uint64_t Add(int fd, uint32_t events, std::shared_ptr<Pollable> pollable);
  // Waits for other events at it; from any thread.
  void Change(uint64_t number, int fd, uint32_t events);
  // Forgets a descriptor, before it is closed; in the thread of the loop only.
  void Remove(uint64_t number, int fd);

 private:
  void Run();
  int TimeoutMs();
  void RunTimers();
  void RunTasks();

  int epoll_ = -1;
  int wakeup_ = -1;
  std::atomic<uint64_t> thread_{0};
  std::mutex mutex_;  // of what follows
  uint64_t last_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Pollable>> pollables_;
  std::vector<std::function<void()>> tasks_;
  std::map<Timer, std::function<void()>> timers_;
};

}  // namespace pytriton::grpc
