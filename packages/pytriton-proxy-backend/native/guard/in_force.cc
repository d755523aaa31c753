#include "in_force.h"

#include <pthread.h>
#include <sys/mman.h>

#include <new>

namespace pytriton::guard {

namespace {

void LeaveChild() {
  InForce* const in_force = g_in_force.load(std::memory_order_relaxed);
  in_force->guard.store(nullptr, std::memory_order_relaxed);
  in_force->front_end.store(nullptr, std::memory_order_relaxed);
}

}  // namespace

bool PutInForce(Guard* guard) {
  void* const page = mmap(nullptr, sizeof(InForce), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return false;
  // Linux has this since 4.14. A handler of fork would be enough for forks, but a bare `clone` does not run it.
  madvise(page, sizeof(InForce), MADV_WIPEONFORK);
  auto* const in_force = new (page) InForce{};
  in_force->guard.store(guard, std::memory_order_relaxed);
  in_force->process = getpid();
  g_in_force.store(in_force, std::memory_order_release);
  pthread_atfork(nullptr, nullptr, LeaveChild);
  return true;
}

}  // namespace pytriton::guard
