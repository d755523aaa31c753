#include "open_files.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <mutex>
#include <string_view>

#include "../hooks.h"
#include "../startup.h"

namespace pytriton::guard {
namespace {

// The same message is logged again only after this time.
constexpr time_t kSayAgainSeconds = 10;
// How long the guard waits for the request of a caller who is turned away; all other callers wait meanwhile.
constexpr int kTurnedAwayMs = 10;

// This descriptor is closed when the process can open no more, to accept a caller.
std::atomic<int> g_spare{-1};

// Answers the first request of a caller, if it has come with the connection and has no body: that the server is alive,
// and for all other requests that it has no descriptor.
void AnswerTurnedAway(int fd) {
  constexpr std::string_view kLive = "GET /v2/health/live ";
  constexpr std::string_view kAlive = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
  constexpr std::string_view kNone =
      "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 47\r\nConnection: close\r\n\r\n"
      "{\"error\":\"the server has too many open files\"}\n";
  pollfd readable{fd, POLLIN, 0};
  char request[4096];
  if (poll(&readable, 1, kTurnedAwayMs) <= 0) return;
  const ssize_t size = recv(fd, request, sizeof(request), MSG_DONTWAIT);
  const std::string_view text(request, size > 0 ? size : 0);
  if (text.rfind("GET ", 0) != 0) return;
  const std::string_view answer = text.rfind(kLive, 0) == 0 ? kAlive : kNone;
  (void)!send(fd, answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

void KeepSpare() { g_spare = open("/dev/null", O_RDONLY | O_CLOEXEC); }

void TurnAway(int listener, sockaddr* address, socklen_t* length, int flags) {
  static std::mutex mutex;
  static time_t said = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto close_it = NEXT(close);
  if (const int spare = g_spare.exchange(-1); spare >= 0) close_it(spare);
  const int fd = NEXT(accept4)(listener, address, length, flags);
  if (fd >= 0) {
    AnswerTurnedAway(fd);
    close_it(fd);
  }
  KeepSpare();
  if (const time_t now = time(nullptr); now >= said + kSayAgainSeconds) {
    said = now;
    Log('W', "Too many open files: callers over HTTP are turned away. Raise the limit (ulimit -Hn), or let callers keep "
             "fewer connections");
  }
}

}  // namespace pytriton::guard
