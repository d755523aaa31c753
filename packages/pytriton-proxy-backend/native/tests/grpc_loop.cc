// The clock of a loop: a task that one thread forgets, just as the loop begins with it, runs once or never.
#include "../grpc/loop.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <random>
#include <vector>

#include "check.h"

using pytriton::grpc::Clock;
using pytriton::grpc::Loop;

int main() {
  constexpr int kRounds = 300;
  constexpr int kTimers = 100;
  static Loop loop;  // its thread runs until the process ends
  CHECK(loop.Start());
  std::mt19937 random(1);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::atomic<int>> runs(kTimers);
    std::vector<Loop::Timer> timers(kTimers);
    std::mutex mutex;
    std::condition_variable changed;
    bool is_set = false;
    bool is_done = false;
    const auto now = Clock::now();
    loop.Post([&] {
      for (int i = 0; i < kTimers; ++i) {
        timers[i] = loop.At(now + std::chrono::microseconds(i * 10), [&runs, i] { ++runs[i]; });
      }
      loop.At(now + std::chrono::microseconds(kTimers * 10), [&] {
        const std::lock_guard<std::mutex> lock(mutex);
        is_done = true;
        changed.notify_all();
      });
      const std::lock_guard<std::mutex> lock(mutex);
      is_set = true;
      changed.notify_all();
    });
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_set; });
    lock.unlock();
    std::vector<int> forgotten;
    for (int i = 0; i < kTimers; ++i) {
      if (random() % 2 == 0) continue;
      loop.Forget(timers[i]);
      forgotten.push_back(i);
    }
    for (const int i : forgotten) loop.Forget(timers[i]);
    lock.lock();
    changed.wait(lock, [&] { return is_done; });
    for (int i = 0; i < kTimers; ++i) {
      const bool is_forgotten = std::find(forgotten.begin(), forgotten.end(), i) != forgotten.end();
      CHECK(runs[i] == 1 || (is_forgotten && runs[i] == 0));
    }
  }
  return 0;
}
