#include "shared_mappings.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

namespace pytriton::guard {
namespace {

// Read without a lock, also by signal handlers; written with the mutex.
struct Mapping {
  std::atomic<uintptr_t> begin{0};  // 0 if not in use
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> broken{false};
};

// The list grows and is never freed; callers may register any number of regions.
struct Chunk {
  Mapping mappings[64];
  std::atomic<Chunk*> next{nullptr};
};

Chunk g_first;
std::atomic<size_t> g_count{0};
std::mutex g_mutex;
struct sigaction g_before;

Mapping* Find(uintptr_t address) {
  if (g_count.load(std::memory_order_acquire) == 0) return nullptr;
  for (Chunk* chunk = &g_first; chunk != nullptr; chunk = chunk->next.load(std::memory_order_acquire)) {
    for (Mapping& mapping : chunk->mappings) {
      const uintptr_t begin = mapping.begin.load(std::memory_order_acquire);
      if (begin != 0 && address >= begin && address < mapping.end.load(std::memory_order_acquire)) return &mapping;
    }
  }
  return nullptr;
}

// Whether memory can be read. The kernel checks it as the argument of a call that then fails.
bool IsReadable(uintptr_t address) {
  const int before = errno;
  syscall(SYS_rt_sigprocmask, -1, address & ~uintptr_t{7}, nullptr, sizeof(uint64_t));
  const bool readable = errno != EFAULT;
  errno = before;
  return readable;
}

void OnBusError(int number, siginfo_t* info, void* context) {
  if (MendSharedMemory(info->si_addr)) return;
  if ((g_before.sa_flags & SA_SIGINFO) != 0) {
    g_before.sa_sigaction(number, info, context);
  } else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(number);
  } else {
    // The signal comes again, and ends the process.
    signal(number, SIG_DFL);
  }
}

}  // namespace

void AddSharedMapping(void* address, size_t length) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  Chunk* chunk = &g_first;
  for (;;) {
    for (Mapping& mapping : chunk->mappings) {
      if (mapping.begin.load(std::memory_order_relaxed) != 0) continue;
      const auto begin = reinterpret_cast<uintptr_t>(address);
      mapping.broken.store(false, std::memory_order_relaxed);
      mapping.end.store(begin + length, std::memory_order_relaxed);
      mapping.begin.store(begin, std::memory_order_release);
      g_count.fetch_add(1, std::memory_order_release);
      return;
    }
    Chunk* next = chunk->next.load(std::memory_order_relaxed);
    if (next == nullptr) {
      next = new Chunk;
      chunk->next.store(next, std::memory_order_release);
    }
    chunk = next;
  }
}

void RemoveSharedMapping(void* address, size_t) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  for (Chunk* chunk = &g_first; chunk != nullptr; chunk = chunk->next.load(std::memory_order_relaxed)) {
    for (Mapping& mapping : chunk->mappings) {
      if (mapping.begin.load(std::memory_order_relaxed) != reinterpret_cast<uintptr_t>(address)) continue;
      mapping.begin.store(0, std::memory_order_release);
      g_count.fetch_sub(1, std::memory_order_release);
      return;
    }
  }
}

std::string CheckSharedMemory(const void* base, size_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  const Mapping* mapping = size == 0 ? nullptr : Find(begin);
  if (mapping == nullptr) return "";
  constexpr char kAdvice[] = "; register the region anew, and leave its file as long as it is while it is registered";
  const uintptr_t end = mapping->end.load(std::memory_order_acquire);
  if (size > end - begin) return "does not lie in its region of shared memory";
  if (mapping->broken.load(std::memory_order_acquire)) {
    return std::string("lies in a region of shared memory whose file was made shorter while it was used") + kAdvice;
  }
  // If the file has become shorter, the end of the region cannot be read.
  if (IsReadable(begin + size - 1)) return "";
  return std::string("lies behind the end of the file of its shared memory, which was made shorter") + kAdvice;
}

bool MendSharedMemory(const void* address) {
  const auto place = reinterpret_cast<uintptr_t>(address);
  Mapping* mapping = Find(place);
  if (mapping == nullptr) return false;
  // This comes before the faulting thread goes on, so that the region is not used again.
  mapping->broken.store(true, std::memory_order_release);
  const int before = errno;
  const auto page_size = static_cast<uintptr_t>(getpagesize());
  const uintptr_t begin = place & ~(page_size - 1);
  const uintptr_t end = (mapping->end.load(std::memory_order_acquire) + page_size - 1) & ~(page_size - 1);
  // The rest of the region has no file either.
  const auto mended = reinterpret_cast<void*>(
      syscall(SYS_mmap, begin, end - begin, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0));
  errno = before;
  return mended != MAP_FAILED;
}

void HandleSharedMemoryFaults() {
  struct sigaction action{};
  action.sa_sigaction = OnBusError;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &g_before);
}

}  // namespace pytriton::guard
