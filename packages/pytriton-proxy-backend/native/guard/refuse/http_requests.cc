#include "http_requests.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <string_view>

#include "../../grpc/front_end.h"
#include "../answers/responses.h"
#include "../frontend/callers.h"
#include "../frontend/epoll.h"
#include "../hooks.h"
#include "../protections.h"
#include "held_back.h"
#include "refusals.h"

namespace pytriton::guard {
namespace {

// After a refusal, the caller's bytes are read for so long, so that the caller gets to read the answer.
constexpr time_t kMaxDrainSeconds = 10;
constexpr uint64_t kMaxDrainBytes = 256ull << 20;
// A caller with more unanswered requests does not read its answers.
constexpr size_t kMostUnanswered = 128;

// Counts the memory that the request needs by now. Returns false if all requests in flight together need too much.
bool ReserveMemory(Guard* guard, Connection* connection) {
  uint64_t needed = connection->scan.memory();
  for (const auto& request : connection->unanswered) {
    if (request != nullptr && request->generate != nullptr) needed += request->generate->memory();
  }
  if (needed <= kSmall || needed <= connection->charged) return true;
  if (!guard->bodies.TryReserve(needed - connection->charged, guard->limits.max_in_flight_bytes)) return false;
  connection->charged = needed;
  return true;
}

// Counts a complete request among those that wait for responses.
void Await(Guard* guard, Connection* connection) {
  const uint64_t sent = connection->scan.body_bytes();
  if (sent <= kSmall / kBytesPerJsonByte) return;
  guard->awaiting.fetch_add(sent, std::memory_order_relaxed);
  connection->awaiting += sent;
}

const char* ReasonPhrase(int status) {
  switch (status) {
    case kNoContent:
      return "No Content";
    case 403:
      return "Forbidden";
    case kNotAllowed:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Payload Too Large";
    case 414:
      return "URI Too Long";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 500:
      return "Internal Server Error";
    default:
      return "Bad Request";
  }
}

// Sends an answer in place of the server, which never sees the request.
void SendOwnResponse(const Guard& guard, const HttpScan& scan, int fd, const Refusal& refusal) {
  const bool has_body = refusal.status != kNotAllowed && refusal.status != kNoContent;
  const std::string body = has_body ? "{\"error\":\"" + refusal.text + "\"}" : "";
  std::string answer = "HTTP/1.1 " + StatusText(refusal.status) + "\r\nConnection: close\r\n";
  if (has_body) answer += "Content-Type: application/json\r\n";
  if (refusal.status == kNotAllowed) answer += "Allow: GET, POST\r\n";
  if (refusal.status != kNoContent) answer += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  if (guard.cors.is_on()) {
    answer += scan.is_preflight() ? guard.cors.PreflightHeaders(scan.origin(), scan.wanted_headers())
                                  : guard.cors.Headers(scan.origin());
  }
  answer += "\r\n" + body;
  // This does not wait for a caller that reads nothing, or has left.
  if (send(fd, answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) shutdown(fd, SHUT_WR);
}

// Reads and drops what a refused caller still sends; if the connection were closed at once, the answer would be lost.
ssize_t DrainRequest(Connection* connection, int fd) {
  char scratch[64 * 1024];
  for (int i = 0; i < 16; ++i) {
    if (connection->drained_bytes > kMaxDrainBytes || time(nullptr) - connection->refused_at > kMaxDrainSeconds) {
      return 0;
    }
    const ssize_t count = recv(fd, scratch, sizeof(scratch), MSG_DONTWAIT);
    if (count <= 0) return count;
    connection->drained_bytes += static_cast<uint64_t>(count);
  }
  errno = EAGAIN;
  return -1;
}

void CountRefusal(Guard* guard, const Connection* connection, const Refusal& refusal) {
  InferencePath path;
  if (!connection->scan.FindInference(&path)) return;
  guard->outcomes.Count(path.model, Protocol::kHttp, OutcomeOfStatus(refusal.status, false));
}

ssize_t Refuse(Connection* connection, int fd, const Refusal& refusal, size_t before) {
  // Probes that only check whether the server is there are not logged.
  if (refusal.status != kNotAllowed && refusal.status != kNoContent) LogRefusal(refusal.text);
  // The answer to a request in front may have begun, and its head may be held back until its end is known.
  const bool is_behind_another = connection->awaits_response() || !connection->answers.is_at_begin() || before > 0;
  connection->is_refused = true;
  connection->refused_at = time(nullptr);
  // What has come of the request stays counted until the connection is closed, because the server keeps it until then.
  if (is_behind_another) {
    // The caller would take an answer now for that of the request in front.
    shutdown(fd, SHUT_RD);
    if (before > 0) return static_cast<ssize_t>(before);
  } else {
    SendOwnResponse(*Active(), connection->scan, fd, refusal);
  }
  errno = EAGAIN;
  return -1;
}

// If a request changes trace settings over HTTP, the front end for gRPC passes its requests on to Triton's own.
void LookForTraces(std::string_view begin) {
  grpc::FrontEnd* const front_end = ActiveFrontEnd();
  if (front_end == nullptr || begin.empty() || begin[0] != 'P') return;
  const std::string_view line = begin.substr(0, std::min(begin.find('\r'), begin.size()));
  if (line.find("/trace/setting") != std::string_view::npos) front_end->ForwardAll();
}

// Begins the next request of a connection with its first bytes.
void BeginScan(Guard* guard, Connection* connection, std::string_view begin) {
  HttpScan& scan = connection->scan;
  if (connection->awaits_response() != connection->is_pipelined) {
    connection->is_pipelined = connection->awaits_response();
    guard->pipelined.fetch_add(connection->is_pipelined ? 1 : -1);
  }
  if (!connection->awaits_response()) ReleaseMemory(guard, connection);
  scan.Begin();
  LookForTraces(begin);
  // If the server is being replaced, the answer closes the connection, so that the next request goes to its successor.
  scan.set_last(!guard->listeners.accepts());
  scan.set_makes_spans(guard->makes_spans);
  scan.set_reads_origin(guard->cors.is_on());
}

// Returns what is wrong with the part of a request that has come; status 0 means nothing.
Refusal FindRefusal(Guard* guard, Connection* connection) {
  const HttpScan& scan = connection->scan;
  if (scan.complete() && scan.is_preflight()) {
    if (guard->cors.Allows(scan.origin())) return {kNoContent, ""};
    return {403, "the origin of the page that asks is not among the cors_origins of this server"};
  }
  // First, so that the answer does not depend on how much of the body has come.
  if (guard->limits.refuse != 0 && scan.is_of_another_site() && !guard->cors.Allows(scan.origin())) {
    return {403, "the page that sends this request is of another site, which is not among the cors_origins of this server"};
  }
  if (scan.refusal().status != 0 || guard->limits.refuse == 0) return scan.refusal();
  if (!ReserveMemory(guard, connection)) {
    return {503, "the requests in flight need more than " + Bytes(guard->limits.max_in_flight_bytes) +
                     ", the limit max_in_flight_bytes of the guard; try again later"};
  }
  if (scan.complete() && connection->unanswered.size() >= kMostUnanswered) {
    return {503, "more than " + std::to_string(kMostUnanswered) + " requests of one connection wait for their answers"};
  }
  if (scan.is_compressed() && guard->leaked.load() > guard->limits.max_in_flight_bytes / 4) {
    return {503, "compressed requests are not taken any more until a restart: those that failed have left " +
                     Bytes(guard->leaked.load()) + " in the server, which it never gives back"};
  }
  return {};
}

Refusal LongFirstLine() {
  return {414, "the first line of the request, with its path, has more than " + Bytes(kMostFirstLine)};
}

// Whether the server may see only one request of a connection until that is answered.
bool SeesOneRequest(const Connection* connection, int fd) {
  return !connection->is_out_of_step && !connection->answers.is_lost() && CanSayReadable(fd);
}

// Nothing is refused, so a connection that cannot be followed is passed on to Triton unexamined from now on.
ssize_t LeaveAlone(Connection* connection, size_t size) {
  connection->is_left_alone = true;
  connection->is_held_cut = false;
  return static_cast<ssize_t>(size);
}

// Examines what was read. Returns how much of it the server may see; the rest is held back.
ssize_t Inspect(Guard* guard, Connection* connection, int fd, const iovec* parts, int count, size_t size) {
  Reach(Protection::kHttpRequests);
  t_reads_http = true;
  HttpScan& scan = connection->scan;
  size_t seen = 0;
  size_t request_begin = 0;  // where the current request begins in these bytes
  for (int i = 0; i < count && seen < size; ++i) {
    auto* data = static_cast<char*>(parts[i].iov_base);
    size_t left = std::min(parts[i].iov_len, size - seen);
    while (left > 0) {
      if (scan.complete() || !scan.started()) {
        BeginScan(guard, connection, {data, left});
        request_begin = seen;
      }
      const size_t used = scan.Feed(data, left, guard->limits, guard->max_pieces);
      const Refusal refusal = FindRefusal(guard, connection);
      if (refusal.status != 0) {
        if (guard->limits.refuse == 0 && !scan.is_preflight()) return LeaveAlone(connection, size);
        if (!scan.is_preflight()) CountRefusal(guard, connection, refusal);
        return Refuse(connection, fd, refusal, request_begin);
      }
      if (scan.complete()) {
        connection->has_ended_one = true;
        Await(guard, connection);
        BeginOutcome(guard, connection);
      }
      data += used;
      left -= used;
      seen += used;
      if (scan.complete() && seen < size && SeesOneRequest(connection, fd)) {
        return HoldBack(connection, parts, count, seen, size);
      }
    }
  }
  const size_t cut = scan.LookAtCutLine();
  if (cut == 0) return static_cast<ssize_t>(size);
  const Refusal refusal = cut < kMostFirstLine ? scan.refusal() : LongFirstLine();
  if (refusal.status == 0) {
    scan.Begin();
    connection->is_held_cut = connection->held.empty();
    return HoldBack(connection, parts, count, size - cut, size);
  }
  if (guard->limits.refuse == 0) return LeaveAlone(connection, size);
  return Refuse(connection, fd, refusal, request_begin);
}

}  // namespace

void ReleaseMemory(Guard* guard, Connection* connection) {
  guard->bodies.Release(connection->charged);
  connection->charged = 0;
}

void StopAwaiting(Guard* guard, Connection* connection) {
  guard->awaiting.fetch_sub(connection->awaiting, std::memory_order_relaxed);
  connection->awaiting = 0;
}

std::string StatusText(int status) { return std::to_string(status) + " " + ReasonPhrase(status); }

ssize_t ReadHttp(int fd, const iovec* parts, int count) {
  const auto next = NEXT(readv);
  Guard* guard = Active();
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Find(fd);
  if (connection == nullptr) return next(fd, parts, count);
  BeginHandling(guard, fd);
  if (connection->is_left_alone) return ReadBehindHeld(connection, fd, parts, count);
  if (connection->is_refused) return DrainRequest(connection, fd);
  const bool is_answered = !connection->is_being_answered();
  if (!is_answered && CanSayReadable(fd)) return AwaitAnswer(connection, fd, parts, count);
  const bool is_idle = is_answered && connection->held.empty() && (connection->scan.complete() || !connection->scan.started());
  const ssize_t size = ReadBehindHeld(connection, fd, parts, count);
  if (size < 0 && errno == ENOBUFS && guard->limits.refuse == 0) {
    LeaveAlone(connection, 0);
    return ReadBehindHeld(connection, fd, parts, count);
  }
  if (size < 0 && errno == ENOBUFS) return Refuse(connection, fd, LongFirstLine(), 0);
  if (size > 0 && is_idle && guard->listeners.has_left()) {
    // The next request is scanned from the beginning.
    connection->scan.Begin();
    return Refuse(connection, fd, {408, "the server was replaced; ask again over another connection"}, 0);
  }
  if (size <= 0) return size;
  const bool is_begin = connection->scan.complete() || !connection->scan.started();
  const size_t left = is_begin ? DropLineEnds(parts, count, static_cast<size_t>(size)) : static_cast<size_t>(size);
  if (left == 0) {
    errno = EAGAIN;
    return -1;
  }
  connection->has_ended_one = false;
  const ssize_t given = Inspect(guard, connection, fd, parts, count, left);
  WatchHead(connection, fd);
  if (!connection->held.empty() && !connection->is_held_cut && !connection->is_being_answered()) SayReadable(fd);
  return given;
}

void RefuseLateHead(Connection* connection, int fd) {
  Refuse(connection, fd, {408, "the head of the request has not come within " +
                                   std::to_string(Active()->limits.head_timeout_s) + " seconds"}, 0);
  // The server then reads the end of the connection.
  shutdown(fd, SHUT_RDWR);
}

}  // namespace pytriton::guard
