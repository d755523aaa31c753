// A child of the server that closes all that it has inherited: the server listens and reads on.
// `guard_children fork|vfork|clone`
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "check.h"

// By which the guard knows the server.
extern "C" __attribute__((visibility("default"))) void TRITONSERVER_ApiVersion() {}
// What is known of a connection is kept for the next with the same number, in a table that no leak detector looks into.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

namespace {

constexpr int kMostDescriptors = 64;
constexpr int kPatienceMs = 60'000;

// Before the guard's own: what the starter of a server gives it, so that it cares for the sockets that listen.
__attribute__((constructor(101))) void GiveHandover() {
  int channel[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, channel) == 0);
  setenv("PYTRITON_GUARD_HANDOVER", (std::to_string(channel[1]) + ",999").c_str(), 1);
}

int Connect(const sockaddr_in& address) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  return fd;
}

// Nothing but what a child with the memory of its parent may do.
__attribute__((no_sanitize("address", "undefined"))) void CloseAll() {
  for (int fd = 3; fd < kMostDescriptors; ++fd) close(fd);
  _exit(0);
}

__attribute__((no_sanitize("address", "undefined"), noinline)) pid_t RunChild(const std::string& kind) {
  const pid_t child = kind == "vfork"   ? vfork()
                      : kind == "clone" ? static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0))
                                        : fork();
  if (child == 0) CloseAll();
  return child;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener, 8) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);

  // A connection that the guard keeps in the epoll of this thread.
  const int caller = Connect(address);
  const int server = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK);
  const int epoll = epoll_create1(0);
  epoll_event event{};
  CHECK(server >= 0 && epoll >= 0 && epoll_wait(epoll, &event, 1, 0) == 0);
  event.events = EPOLLIN;
  event.data.u64 = static_cast<uint64_t>(server);
  CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event) == 0);
  CHECK(epoll_wait(epoll, &event, 1, 0) == 0);

  const pid_t child = RunChild(argv[1]);
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);

  CHECK(write(caller, "x", 1) == 1);
  CHECK(epoll_wait(epoll, &event, 1, kPatienceMs) == 1 && event.data.u64 == static_cast<uint64_t>(server));
  const int another = Connect(address);
  CHECK(accept4(listener, nullptr, nullptr, 0) >= 0);
  // In this process the guard goes on: who closes a socket that listens has it listen nowhere.
  const int copy = dup(listener);
  close(listener);
  CHECK(accept4(copy, nullptr, nullptr, SOCK_NONBLOCK) == -1 && errno == EINVAL);
  close(another);
  return 0;
}
