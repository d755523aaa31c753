#include "orphans.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>

namespace pytriton::guard {
namespace {

constexpr unsigned kStarterPauseSeconds = 2;
// This is longer than a server waits for its requests, 30 s, and then for its connections.
constexpr unsigned kOrphanSeconds = 45;

// Nothing here takes memory or locks, because the server may have broken both.
void* WatchStarter(void* given) {
  const auto starter = static_cast<pid_t>(reinterpret_cast<intptr_t>(given));
  while (getppid() == starter) sleep(kStarterPauseSeconds);
  sleep(kOrphanSeconds);
  kill(getpid(), SIGKILL);
  return nullptr;
}

}  // namespace

void EndWithStarter() {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const auto starter = static_cast<intptr_t>(getppid());
  if (pthread_create(&thread, nullptr, WatchStarter, reinterpret_cast<void*>(starter)) == 0) pthread_detach(thread);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace pytriton::guard
