// The wait for threads of instances, with threads that compute, sleep and end.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "../guard/instance_threads.h"
#include "check.h"

namespace {

using Clock = std::chrono::steady_clock;

struct ModelDeleter {
  virtual ~ModelDeleter() = default;
};

struct Other {
  virtual ~Other() = default;
};

void Names() {
  ModelDeleter deletion;
  Other other;
  CHECK(pytriton::guard::DeletesModel(&deletion));
  CHECK(!pytriton::guard::DeletesModel(&other));
}

void Waits() {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::atomic<bool> slept{false}, known{false};
  std::thread ended([] { pytriton::guard::AddInstanceThread(); });
  ended.join();
  std::thread instance([&] {
    pytriton::guard::AddInstanceThread();
    known = true;
    for (const auto end = Clock::now() + std::chrono::milliseconds(200); Clock::now() < end;) {
    }
    slept = true;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return over; });
  });
  while (!known) std::this_thread::yield();
  const auto begin = Clock::now();
  pytriton::guard::WaitForInstanceThreads();
  // The limit of the wait: a thread that computes is not waited for any longer.
  CHECK(slept || Clock::now() - begin >= std::chrono::seconds(2));
  {
    const std::lock_guard<std::mutex> lock(mutex);
    over = true;
  }
  changed.notify_all();
  instance.join();
  // All have ended.
  pytriton::guard::WaitForInstanceThreads();
}

void DoesNotWaitForEver() {
  std::atomic<bool> known{false}, over{false};
  std::thread instance([&] {
    pytriton::guard::AddInstanceThread();
    known = true;
    while (!over) {
    }
  });
  while (!known) std::this_thread::yield();
  pytriton::guard::WaitForInstanceThreads();
  over = true;
  instance.join();
}

}  // namespace

int main() {
  Names();
  Waits();
  DoesNotWaitForEver();
  return 0;
}
