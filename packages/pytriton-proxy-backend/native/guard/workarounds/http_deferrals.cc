#include "http_deferrals.h"

#include <sys/socket.h>

#include <cerrno>

namespace pytriton::guard {

void HttpDeferrals::OnPair(int reader, int writer) {
  const auto is_in = [](int fd) { return fd >= 0 && static_cast<size_t>(fd) < kMost; };
  if (!is_in(reader) || !is_in(writer)) return;
  Pipe* pipe;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pipe = &pipes_.emplace_back(writer);
  }
  readers_[static_cast<size_t>(reader)].store(pipe, std::memory_order_release);
  writers_[static_cast<size_t>(writer)].store(pipe, std::memory_order_release);
}

void HttpDeferrals::OnClose(int fd) {
  if (fd < 0 || static_cast<size_t>(fd) >= kMost) return;
  for (Pipes* pipes : {&readers_, &writers_}) {
    auto& pipe = (*pipes)[static_cast<size_t>(fd)];
    // It is read first, because nearly all descriptors are other ones.
    if (pipe.load(std::memory_order_relaxed) != nullptr) pipe.store(nullptr, std::memory_order_release);
  }
}

ssize_t HttpDeferrals::Write(int fd, const void* data, size_t size, int flags, Send next) {
  Pipe* const pipe = Find(writers_, fd);
  if (pipe == nullptr) return next(fd, data, size, flags);
  const std::lock_guard<std::mutex> lock(pipe->mutex);
  if (pipe->kept.empty()) {
    const ssize_t written = next(fd, data, size, flags | MSG_DONTWAIT);
    if (written >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return written;
  }
  pipe->kept.emplace_back(static_cast<const char*>(data), size);
  pipe->has_kept.store(true, std::memory_order_seq_cst);
  // The thread may have read everything since the attempt, without knowing of this message, so it is tried once more.
  // If the socket is full even now, the thread will read something and then call `OnRead`.
  Flush(pipe, next);
  return static_cast<ssize_t>(size);
}

void HttpDeferrals::OnRead(int fd, Send next) {
  Pipe* const pipe = Find(readers_, fd);
  if (pipe == nullptr || !pipe->has_kept.load(std::memory_order_seq_cst)) return;
  const std::lock_guard<std::mutex> lock(pipe->mutex);
  Flush(pipe, next);
}

void HttpDeferrals::Flush(Pipe* pipe, Send next) {
  while (!pipe->kept.empty()) {
    const std::string& first = pipe->kept.front();
    if (next(pipe->writer, first.data(), first.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
      // The reading end is closed.
      if (errno == EPIPE || errno == EBADF) pipe->kept.clear();
      return;
    }
    pipe->kept.pop_front();
  }
  pipe->has_kept.store(false, std::memory_order_seq_cst);
}

HttpDeferrals& Deferrals() {
  static auto* const made = new HttpDeferrals;
  return *made;
}

}  // namespace pytriton::guard
