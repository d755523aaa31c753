#include "goodbye.h"

#include <array>
#include <cerrno>
#include <mutex>

#include "../hooks.h"
#include "../in_force.h"
#include "../protections.h"
#include "http2_frames.h"

namespace pytriton::guard {
namespace {

std::mutex& WritingOf(int fd) {
  static std::array<std::mutex, 64> mutexes;
  return mutexes[static_cast<size_t>(fd) % mutexes.size()];
}

// Sends GOAWAY, once, before what is sent next. Returns false if the system takes no more for now.
bool SayGoodbye(Connection* connection, int fd, uint32_t last_stream) {
  const auto frame = GoAway(last_stream);
  size_t& done = connection->goodbye_bytes;
  if (done == frame.size() || (done == 0 && !connection->sent.is_between_frames())) return true;
  const ssize_t count = send(fd, frame.data() + done, frame.size() - done, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (count > 0) done += static_cast<size_t>(count);
  return done == 0 || done == frame.size();
}

}  // namespace

ssize_t SendGrpc(int fd, const msghdr* message, int flags) {
  const auto next = NEXT(sendmsg);
  Guard* guard = Active();
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Find(fd);
  if (connection == nullptr) return next(fd, message, flags);
  const std::lock_guard<std::mutex> lock(WritingOf(fd));
  if (!guard->listeners.accepts() && !SayGoodbye(connection, fd, kAnyStream)) {
    errno = EAGAIN;
    return -1;
  }
  const ssize_t size = next(fd, message, flags);
  if (size > 0) connection->sent.Pass(message->msg_iov, message->msg_iovlen, static_cast<size_t>(size));
  return size;
}

ssize_t ReceiveGrpc(int fd, msghdr* message, int flags) {
  const auto next = NEXT(recvmsg);
  Guard* guard = Active();
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Find(fd);
  const ssize_t size = next(fd, message, flags);
  if (connection == nullptr || size <= 0) return size;
  Reach(Protection::kGrpcConnections);
  const uint32_t last_stream = connection->received.last_stream();
  connection->received.Pass(message->msg_iov, message->msg_iovlen, static_cast<size_t>(size));
  if (!guard->listeners.has_left() || connection->received.last_stream() == last_stream) return size;
  const std::lock_guard<std::mutex> lock(WritingOf(fd));
  if (connection->sent.is_between_frames()) {
    // The request was not served, so its caller repeats it over another connection.
    connection->goodbye_bytes = 0;
    SayGoodbye(connection, fd, last_stream);
    return 0;
  }
  return size;
}

}  // namespace pytriton::guard
