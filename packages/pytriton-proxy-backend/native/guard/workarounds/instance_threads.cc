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

// Never destroyed: threads run until the end.
struct Threads {
  std::mutex mutex;
  std::vector<pid_t> ids;
};

Threads& threads() {
  static auto* const made = new Threads();
  return *made;
}

// The letter of a thread's state in the kernel; 0 where there is no such thread any more.
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
  // "ID (NAME) STATE ...", and a name may hold anything.
  const char* const name_end = std::strrchr(text, ')');
  return name_end == nullptr || name_end[1] == '\0' ? 0 : name_end[2];
}

int64_t NowMs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

// What a new thread is to run.
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
  // Those that have ended are forgotten here, so that loading and unloading for ever does not fill the list.
  known.ids.erase(std::remove_if(known.ids.begin(), known.ids.end(),
                                 [id](pid_t other) { return other == id || StateOf(other) == 0; }),
                  known.ids.end());
  known.ids.push_back(id);
}

bool DeletesModel(void* state) {
  // A polymorphic object of libstdc++, whose type is known by name alone: before its table of functions is the address
  // of its type_info, whose second word is the name (Itanium C++ ABI, 2.9.5).
  const auto* const table = *static_cast<const void* const* const*>(state);
  const auto* const type = static_cast<const char* const*>(table[-1]);
  return type != nullptr && std::strstr(type[1], "ModelDeleter") != nullptr;
}

void WaitForInstanceThreads() {
  std::vector<pid_t> awake;
  {
    Threads& known = threads();
    const std::lock_guard<std::mutex> lock(known.mutex);
    awake = known.ids;
  }
  for (const int64_t deadline = NowMs() + kLongestWaitMs;; nanosleep(&kPause, nullptr)) {
    awake.erase(std::remove_if(awake.begin(), awake.end(),
                               [](pid_t thread) {
                                 const char now = StateOf(thread);
                                 return now == 0 || now == 'S';
                               }),
                awake.end());
    if (awake.empty() || NowMs() >= deadline) return;
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
