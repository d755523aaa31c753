// All functions that the guard stands in front of are known when it is loaded: none is looked up when it is called.
#include <dlfcn.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <thread>

#include "check.h"

// By which the guard knows the server.
extern "C" __attribute__((visibility("default"))) void TRITONSERVER_ApiVersion() {}

namespace {

int g_lookups = 0;

}  // namespace

// In place of the one of the system, which is found by its versions.
extern "C" __attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) noexcept {
  using Lookup = void* (*)(void*, const char*);
  Lookup system = nullptr;
  for (const char* version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"}) {
    if (system == nullptr) system = reinterpret_cast<Lookup>(dlvsym(RTLD_NEXT, "dlsym", version));
  }
  ++g_lookups;
  return system(handle, name);
}

int main() {
  CHECK(g_lookups > 20);
  g_lookups = 0;
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_storage address{};
  address.ss_family = AF_UNIX;
  socklen_t size = sizeof(sa_family_t);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener, 1) == 0);
  size = sizeof(address);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  int callers[2], servers[2];
  for (int& caller : callers) {
    caller = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(connect(caller, reinterpret_cast<sockaddr*>(&address), size) == 0);
    servers[&caller - callers] =
        &caller == callers ? accept(listener, nullptr, nullptr) : accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  }
  char byte = 'x';
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  int waiting = 0;
  CHECK(writev(callers[0], &part, 1) == 1 && sendmsg(callers[1], &message, 0) == 1);
  CHECK(ioctl(servers[0], FIONREAD, &waiting) == 0 && waiting == 1);
  CHECK(readv(servers[0], &part, 1) == 1 && recvmsg(servers[1], &message, 0) == 1);

  const int epoll = epoll_create1(0);
  epoll_event event{};
  CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, servers[0], &event) == 0 && epoll_wait(epoll, &event, 1, 0) == 0);
  CHECK(shutdown(servers[0], SHUT_RDWR) == 0 && close(servers[0]) == 0);
  CHECK(syscall(SYS_getpid) == getpid());
  CHECK(signal(SIGUSR1, SIG_IGN) == SIG_DFL);
  CHECK(setpriority(PRIO_PROCESS, 0, 0) == 0);
  void* const page = mmap(nullptr, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(page != MAP_FAILED && munmap(page, 1) == 0);
  CHECK(shm_open("/no/name", 0, 0) == -1);
  std::thread([] {}).join();
  CHECK(g_lookups == 0);
  return 0;
}
