#include "held_back.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "../answers/http_answers.h"
#include "../frontend/epoll.h"
#include "../hooks.h"
#include "../in_force.h"
#include "http_requests.h"
#include "late_heads.h"

namespace pytriton::guard {
namespace {

// The heads for which this thread waits.
thread_local LateHeads t_heads;

// The extra time for a head whose rest has come and was not read.
constexpr uint64_t kMoreTimeMs = 1000;

uint64_t NowMs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1'000'000;
}

uint64_t HeadTimeoutMs() { return Active()->limits.head_timeout_s * 1000; }

ssize_t TryAgain() {
  errno = EAGAIN;
  return -1;
}

bool HasLeft(int fd) {
  pollfd asked{fd, POLLRDHUP, 0};
  return poll(&asked, 1, 0) > 0 && (asked.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

// Returns the parts without their first bytes.
std::vector<iovec> Behind(const iovec* parts, int count, size_t bytes) {
  std::vector<iovec> rest;
  for (int i = 0; i < count; ++i) {
    const size_t left_out = std::min(parts[i].iov_len, bytes);
    bytes -= left_out;
    if (left_out < parts[i].iov_len) rest.push_back({static_cast<char*>(parts[i].iov_base) + left_out, parts[i].iov_len - left_out});
  }
  return rest;
}

void Copy(const iovec* parts, int count, std::string_view text) {
  for (int i = 0; i < count && !text.empty(); ++i) {
    const size_t part = std::min(parts[i].iov_len, text.size());
    std::memcpy(parts[i].iov_base, text.data(), part);
    text.remove_prefix(part);
  }
}

}  // namespace

ssize_t ReadBehindHeld(Connection* connection, int fd, const iovec* parts, int count) {
  const auto next = NEXT(readv);
  std::string& held = connection->held;
  if (held.empty()) return next(fd, parts, count);
  const size_t front = std::min(SizeOf(parts, count), held.size());
  ssize_t more = 0;
  if (connection->is_held_cut) {
    const std::vector<iovec> rest = Behind(parts, count, front);
    if (rest.empty()) {
      errno = ENOBUFS;
      return -1;
    }
    more = next(fd, rest.data(), static_cast<int>(rest.size()));
    if (more <= 0) return more;
  }
  Copy(parts, count, std::string_view(held).substr(0, front));
  held.erase(0, front);
  connection->is_held_cut = false;
  return static_cast<ssize_t>(front) + more;
}

size_t DropLineEnds(const iovec* parts, int count, size_t size) {
  if (*static_cast<const char*>(parts[0].iov_base) != '\r') return size;
  std::string text;
  for (const iovec& part : FirstOf(parts, count, size)) text.append(static_cast<const char*>(part.iov_base), part.iov_len);
  size_t dropped = 0;
  while (text.compare(dropped, 2, "\r\n") == 0) dropped += 2;
  Copy(parts, count, std::string_view(text).substr(dropped));
  return size - dropped;
}

ssize_t HoldBack(Connection* connection, const iovec* parts, int count, size_t given, size_t size) {
  std::string rest;
  for (const iovec& part : Behind(parts, count, given)) {
    const size_t left = size - given - rest.size();
    rest.append(static_cast<const char*>(part.iov_base), std::min(part.iov_len, left));
  }
  connection->held.insert(0, rest);
  return given == 0 ? TryAgain() : static_cast<ssize_t>(given);
}

ssize_t AwaitAnswer(Connection* connection, int fd, const iovec* parts, int count) {
  char byte;
  const ssize_t peeked = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (peeked == 0 || (peeked < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) return NEXT(readv)(fd, parts, count);
  if (peeked > 0) {
    // The caller has closed its sending side after its requests, which counts as having left.
    if (HasLeft(fd)) return 0;
    connection->is_paused = true;
    PauseReading(fd);
  }
  return TryAgain();
}

void ReadOn(Connection* connection, int fd) {
  if (connection->is_paused) {
    connection->is_paused = false;
    ResumeReading(fd);
  }
  if (!connection->held.empty()) SayReadable(fd);
}

bool CountReadable(int fd, int* bytes) {
  Guard* const guard = Active();
  const Connection* const connection = guard == nullptr ? nullptr : guard->connections.FindKnown(fd);
  if (connection == nullptr || connection->held.empty()) return false;
  int more = 0;
  if (NEXT(ioctl)(fd, FIONREAD, &more) != 0) more = 0;
  // The end of a connection is read after its last byte, so there must be room for one more.
  if (connection->is_held_cut) more = std::max(more, 1);
  *bytes = static_cast<int>(connection->held.size()) + more;
  return true;
}

void WatchHead(Connection* connection, int fd) {
  // Bytes that are passed on unexamined or dropped are not followed.
  const bool is_followed = !connection->is_left_alone && !connection->is_refused && Active()->limits.refuse != 0;
  const bool is_begun = is_followed && (connection->is_held_cut || connection->scan.is_in_head());
  HeadMark* const mark = Active()->connections.FindHead(fd);
  if (mark == nullptr) return;
  const bool was_begun = mark->began.load(std::memory_order_relaxed) != 0;
  if (is_begun == was_begun && !(is_begun && connection->has_ended_one)) return;
  connection->has_more_time = false;
  const uint64_t now = is_begun ? NowMs() : 0;
  mark->thread.store(&t_heads, std::memory_order_relaxed);
  mark->began.store(now, std::memory_order_release);
  if (is_begun) t_heads.Add(fd, now + HeadTimeoutMs());
}

int TimeoutOfHeads(int timeout_ms) { return t_heads.empty() ? timeout_ms : t_heads.Timeout(timeout_ms, NowMs()); }

void EndLateHeads() {
  if (t_heads.empty()) return;
  Guard* const guard = Active();
  const uint64_t now = NowMs();
  t_heads.EndLate(now, [guard, now](int fd) -> uint64_t {
    HeadMark* const mark = guard->connections.FindHead(fd);
    // The head is complete, or another thread has a new connection with this descriptor.
    if (mark->began.load(std::memory_order_acquire) == 0 || mark->thread.load(std::memory_order_relaxed) != &t_heads) return 0;
    Connection* const connection = guard->connections.FindKnown(fd);
    if (connection == nullptr || connection->is_left_alone || connection->is_refused) return 0;
    // The bytes after a request wait for the server's answer, not for the caller, so the time begins again.
    if (connection->is_being_answered()) mark->began.store(now, std::memory_order_relaxed);
    const uint64_t end = mark->began.load(std::memory_order_relaxed) + HeadTimeoutMs();
    if (end > now) return end;
    // The rest of the head may have come while this thread was busy.
    int unread = 0;
    if (!connection->has_more_time && NEXT(ioctl)(fd, FIONREAD, &unread) == 0 && unread > 0) {
      connection->has_more_time = true;
      return now + kMoreTimeMs;
    }
    mark->began.store(0, std::memory_order_relaxed);
    RefuseLateHead(connection, fd);
    return 0;
  });
}

}  // namespace pytriton::guard
