// The threads of the server: the wait for those of instances, with threads that compute, sleep and end; and how those of
// the HTTP front end share its connections, and requests their memory.

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "../guard/frontend/http_threads.h"
#include "../guard/refuse/memory.h"
#include "../guard/workarounds/instance_threads.h"
#include "check.h"

namespace {

using pytriton::guard::ThreadLoad;
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

// Something that one thread waits for and another one says, once.
class Signal {
 public:
  void Give() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      given_ = true;
    }
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return given_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool given_ = false;
};

// A thread of an instance, which computes for a while and then sleeps, when it is told to.
struct Instance {
  explicit Instance(bool begins) {
    if (begins) work.Give();
    thread = std::thread([this] {
      pytriton::guard::AddInstanceThread();
      known = true;
      work.Wait();
      works = true;
      for (const auto end = Clock::now() + std::chrono::milliseconds(200); Clock::now() < end;) {
      }
      slept = true;
      over.Wait();
    });
    while (!known) std::this_thread::yield();
  }
  ~Instance() {
    over.Give();
    thread.join();
  }

  void IsWaitedFor() {
    while (!works) std::this_thread::yield();
    const auto begin = Clock::now();
    pytriton::guard::WaitForInstanceThreads();
    // The limit of the wait: a thread that computes is not waited for any longer.
    CHECK(slept || Clock::now() - begin >= std::chrono::seconds(2));
  }

  Signal work, over;
  std::atomic<bool> known{false}, works{false}, slept{false};
  std::thread thread;
};

void Waits() {
  std::thread ended([] { pytriton::guard::AddInstanceThread(); });
  ended.join();
  {
    Instance instance(true);
    instance.IsWaitedFor();
  }
  // All have ended.
  pytriton::guard::WaitForInstanceThreads();
}

// A thread that was seen asleep, for long enough that it is not looked at any more, and works again.
void WaitsAgain() {
  Instance instance(false);
  for (int i = 0; i < 3; ++i) {
    pytriton::guard::WaitForInstanceThreads();
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
  }
  instance.work.Give();
  instance.IsWaitedFor();
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

// The pipe that the front end takes for a connection: the first with the fewest messages, which ends the search if it has
// none.
struct FrontEnd {
  FrontEnd(size_t count, unsigned processors) : threads(processors), loads(count, nullptr) {
    for (size_t i = 0; i < count; ++i) {
      std::array<int, 2> ends{};
      CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
      pipes.push_back(ends[0]);
      close(ends[1]);
    }
  }
  ~FrontEnd() {
    for (const int pipe : pipes) close(pipe);
  }

  size_t Accept(int connection) {
    threads.OnAccept(connection);
    size_t taken = pipes.size();
    int least = 0;
    for (size_t i = 0; i < pipes.size(); ++i) {
      CHECK(threads.connection() == connection);
      const auto answer = threads.Ask(pipes[i]);
      CHECK(answer.has_value());
      if (answer->chosen != nullptr) {
        loads[i] = answer->chosen;
        loads[i]->fetch_add(1);
      }
      const int messages = answer->bytes / 17;
      if (taken == pipes.size() || messages < least) {
        taken = i;
        least = messages;
      }
      if (messages == 0) break;
    }
    return taken;
  }

  pytriton::guard::HttpThreads threads;
  std::vector<int> pipes;
  std::vector<pytriton::guard::ThreadLoad*> loads;
};

void Spreads() {
  FrontEnd front_end(4, 4);
  std::vector<int> taken(4, 0);
  for (int connection = 10; connection < 22; ++connection) ++taken[front_end.Accept(connection)];
  CHECK(taken == std::vector<int>(4, 3));
  // Whose connections are closed gets the next ones.
  front_end.loads[2]->fetch_sub(2);
  CHECK(front_end.Accept(22) == 2);
  CHECK(front_end.Accept(23) == 2);
  CHECK(front_end.Accept(24) == 0);
}

void FillsTheFirstThreads() {
  FrontEnd front_end(5, 2);
  std::vector<int> taken(5, 0);
  for (int connection = 10; connection < 18; ++connection) ++taken[front_end.Accept(connection)];
  CHECK(taken == std::vector<int>({4, 4, 0, 0, 0}));
  for (int connection = 18; connection < 22; ++connection) ++taken[front_end.Accept(connection)];
  CHECK(taken == std::vector<int>({4, 4, 4, 0, 0}));
  for (int connection = 22; connection < 30; ++connection) ++taken[front_end.Accept(connection)];
  CHECK(taken == std::vector<int>(5, 4));
  // From here on it is the fewest.
  for (int connection = 30; connection < 35; ++connection) ++taken[front_end.Accept(connection)];
  CHECK(taken == std::vector<int>(5, 5));
  front_end.loads[1]->fetch_sub(2);
  front_end.loads[3]->fetch_sub(5);
  CHECK(front_end.Accept(35) == 3);
  // Those that are no longer needed get no more.
  for (ThreadLoad* const load : front_end.loads) *load = 2;
  CHECK(front_end.Accept(36) == 0);
  CHECK(front_end.Accept(37) == 1);
  CHECK(front_end.Accept(38) == 2);
  CHECK(front_end.Accept(39) == 3);
}

void OneThread() {
  FrontEnd front_end(1, 2);
  for (int connection = 10; connection < 13; ++connection) CHECK(front_end.Accept(connection) == 0);
  CHECK(front_end.loads[0]->load() == 3);
}

void OtherDescriptors() {
  FrontEnd front_end(2, 2);
  const int internet = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(internet >= 0);
  front_end.threads.OnAccept(10);
  CHECK(!front_end.threads.Ask(internet));
  front_end.Accept(10);
  front_end.threads.OnAccept(11);
  CHECK(!front_end.threads.Ask(internet));
  // A search that has found its thread is over.
  front_end.Accept(12);
  CHECK(front_end.threads.connection() == -1);
  close(internet);
}

// Whoever asks for more memory than there is takes none from the others, not for a moment.
void Memory() {
  constexpr uint64_t kLimit = 1000;
  pytriton::guard::MemoryBudget budget;
  std::atomic<bool> is_over{false};
  std::thread greedy([&] {
    while (!is_over) CHECK(!budget.TryReserve(kLimit + 1, kLimit));
  });
  for (int i = 0; i < 1000000; ++i) {
    CHECK(budget.TryReserve(kLimit, kLimit) && !budget.TryReserve(1, kLimit));
    budget.Release(kLimit);
  }
  is_over = true;
  greedy.join();
  CHECK(budget.bytes() == 0);
}

}  // namespace

int main() {
  Memory();
  Spreads();
  FillsTheFirstThreads();
  OneThread();
  OtherDescriptors();
  Names();
  Waits();
  WaitsAgain();
  DoesNotWaitForEver();
  return 0;
}
