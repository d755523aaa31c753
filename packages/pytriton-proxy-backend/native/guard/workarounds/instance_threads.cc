#include "instance_threads.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace pytriton::guard {
namespace {

constexpr int64_t kLongestWaitMs = 2000;
constexpr timespec kPause{0, 500'000};
constexpr size_t kFewThreads = 64;
constexpr int64_t kTrustedSleepMs = 1000;

// Never destroyed, because threads run until the process ends.
struct InstanceThread {
  pid_t id;
  int64_t slept_at_ns;     // its processor time when it was seen asleep; -1 before
  int64_t slept_since_ms;  // when that was seen first
};

struct Threads {
  std::mutex mutex;
  std::vector<InstanceThread> all;
  size_t looked_through = kFewThreads;  // the number of threads from which ended ones are searched again
};

Threads& threads() {
  static auto* const made = new Threads();
  return *made;
}

// The letter of a thread's state in the kernel; 0 if the thread does not exist any more.
char StateOf(pid_t thread) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/self/task/%d/stat", static_cast<int>(thread));
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[256];
  const ssize_t size = read(fd, text, sizeof(text) - 1);
  close(fd);
  if (size <= 0) return 0;
  text[size] = '\0';
  // The text is "ID (NAME) STATE ...", and a name may hold any bytes.
  const char* const name_end = std::strrchr(text, ')');
  return name_end == nullptr || name_end[1] == '\0' ? 0 : name_end[2];
}

int64_t NowMs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

// The processor time of a thread so far, in nanoseconds; -1 if the thread does not exist any more.
int64_t ProcessorTimeOf(pid_t thread) {
  // The clock of a thread, made like in pthread_getcpuclockid: the complement of its id, and the bits for "thread" and
  // "scheduled".
  const auto clock = static_cast<clockid_t>((~static_cast<unsigned>(thread) << 3) | 6U);
  timespec spent{};
  if (clock_gettime(clock, &spent) != 0) return -1;
  return spent.tv_sec * 1'000'000'000 + spent.tv_nsec;
}

// Whether a thread is asleep or has ended. If it was seen asleep and has not run for a second since, it still is: this
// check costs a twentieth of reading its state, and most loaded models are idle. The second is needed because a thread
// in the middle of a request, which wakes every few hundredths of a second, may have been woken and not have run yet.
bool IsAsleep(InstanceThread* thread) {
  const int64_t spent_ns = ProcessorTimeOf(thread->id);
  if (spent_ns < 0) return true;
  const int64_t now_ms = NowMs();
  if (spent_ns == thread->slept_at_ns && now_ms - thread->slept_since_ms >= kTrustedSleepMs) return true;
  const char state = StateOf(thread->id);
  if (state != 0 && state != 'S') return false;
  if (spent_ns != thread->slept_at_ns) {
    thread->slept_at_ns = spent_ns;
    thread->slept_since_ms = now_ms;
  }
  return true;
}

// What a new thread runs.
struct Thread {
  void* (*run)(void*);
  void* argument;
};

void* RunDeletion(void* given) {
  const std::unique_ptr<Thread> thread(static_cast<Thread*>(given));
  WaitForInstanceThreads();
  return thread->run(thread->argument);
}

}  // namespace

void AddInstanceThread() {
  const auto id = static_cast<pid_t>(syscall(SYS_gettid));
  Threads& known = threads();
  const std::lock_guard<std::mutex> lock(known.mutex);
  // Ended threads are removed here, so that endless loading and unloading does not fill the list. It is not done each
  // time, because the cost of a load would grow with the number of models.
  if (known.all.size() >= known.looked_through) {
    known.all.erase(
        std::remove_if(known.all.begin(), known.all.end(),
                       [id](const InstanceThread& other) { return other.id == id || ProcessorTimeOf(other.id) < 0; }),
        known.all.end());
    known.looked_through = std::max(kFewThreads, 2 * known.all.size());
  }
  known.all.push_back({id, -1, 0});
}

bool DeletesModel(void* state) {
  // A polymorphic object of libstdc++, whose type is recognized by its name: before its table of functions lies the
  // address of its type_info, whose second word is the name (Itanium C++ ABI, 2.9.5).
  const auto* const table = *static_cast<const void* const* const*>(state);
  const auto* const type = static_cast<const char* const*>(table[-1]);
  return type != nullptr && std::strstr(type[1], "ModelDeleter") != nullptr;
}

void WaitForInstanceThreads() {
  std::vector<InstanceThread> awake;
  {
    Threads& known = threads();
    const std::lock_guard<std::mutex> lock(known.mutex);
    for (InstanceThread& thread : known.all) {
      if (!IsAsleep(&thread)) awake.push_back(thread);
    }
  }
  for (const int64_t deadline = NowMs() + kLongestWaitMs; !awake.empty() && NowMs() < deadline;) {
    nanosleep(&kPause, nullptr);
    awake.erase(std::remove_if(awake.begin(), awake.end(), [](InstanceThread& thread) { return IsAsleep(&thread); }),
                awake.end());
  }
}

int CreateThread(CreateThreadFunction next, pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                 void* argument) {
  if (!DeletesModel(argument)) return next(thread, attributes, run, argument);
  auto deletion = std::make_unique<Thread>(Thread{run, argument});
  const int error = next(thread, attributes, RunDeletion, deletion.get());
  if (error == 0) deletion.release();
  return error;
}

bool IsStandardLibrary(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 && info.dli_fname != nullptr && std::strstr(info.dli_fname, "libstdc++") != nullptr;
}

}  // namespace pytriton::guard
