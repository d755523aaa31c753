#include "stream_backlog.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace pytriton::guard {

namespace {

struct Given {
  uint64_t bytes = 0;
  bool wants_stream = false;
  std::shared_ptr<StreamBacklog> stream;
};
thread_local Given t_given;

}  // namespace

void StreamBacklog::Add(uint64_t bytes) {
  const uint64_t size = std::max(bytes, kLeast);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_ended_) return;
  sizes_.push_back(size);
  given_.fetch_add(size, std::memory_order_seq_cst);
}

// Called with the lock.
uint64_t StreamBacklog::Pop(uint64_t count) {
  uint64_t size = 0;
  for (; count > 0 && !sizes_.empty(); --count) {
    size += sizes_.front();
    sizes_.pop_front();
  }
  given_.fetch_sub(size, std::memory_order_seq_cst);
  return size;
}

void StreamBacklog::Write(uint64_t bytes, uint64_t count) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    written_ += bytes;
    if (const uint64_t size = Pop(count); size > 0) {
      const uint64_t of_front = std::exchange(of_front_, 0);
      taken_ += size - std::min(size, of_front);
    }
    // This is a part of a large response, which waits as before. As JSON it is several times as large as its tensors,
    // and a caller who reads part of it will read the rest.
    if (count == 0 && !sizes_.empty()) {
      taken_ += bytes;
      of_front_ += bytes;
    }
  }
  if (count > 0) Wake();
}

void StreamBacklog::Pass(uint64_t count) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Pop(count);
  }
  Wake();
}

void StreamBacklog::Hold(uint64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_ended_) return;
    const uint64_t before = held_.exchange(bytes, std::memory_order_seq_cst);
    if (bytes < before) taken_ += before - bytes;
  }
  Wake();
}

void StreamBacklog::SetSocket(int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fd_ = fd;
}

void StreamBacklog::End() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_ended_ = true;
    fd_ = -1;
    sizes_.clear();
    given_.store(0, std::memory_order_seq_cst);
    held_.store(0, std::memory_order_seq_cst);
  }
  Wake();
}

uint64_t StreamBacklog::SeeTaken() {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t taken = taken_;
  int unsent = 0;
  // Bytes in the socket count in the same proportion as all bytes that were written.
  if (fd_ >= 0 && written_ > 0 && ioctl(fd_, SIOCOUTQ, &unsent) == 0 && unsent > 0) {
    const double share = static_cast<double>(unsent) / static_cast<double>(written_);
    taken -= static_cast<uint64_t>(std::min(share, 1.0) * static_cast<double>(taken));
  }
  seen_ = std::max(seen_, taken);
  return seen_;
}

void StreamBacklog::WakeBelow(uint64_t bytes, int event_fd) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    below_ = bytes;
    event_fd_ = event_fd;
    is_watched_.store(event_fd >= 0, std::memory_order_seq_cst);
  }
  // The caller may have read it before the event was set.
  Wake();
}

void StreamBacklog::Wake() {
  if (!is_watched_.load(std::memory_order_seq_cst)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (event_fd_ < 0 || waiting() > below_) return;
  const uint64_t one = 1;
  // If the event's count is full, it wakes as well.
  [[maybe_unused]] const ssize_t written = write(event_fd_, &one, sizeof(one));
  event_fd_ = -1;
  is_watched_.store(false, std::memory_order_seq_cst);
}

void GivenResponse::Announce(uint64_t bytes, bool wants_stream) {
  t_given.bytes = std::max<uint64_t>(bytes, 1);
  t_given.wants_stream = wants_stream;
  t_given.stream.reset();
}

uint64_t GivenResponse::TakeBytes() { return std::exchange(t_given.bytes, 0); }

void GivenResponse::Note(const std::shared_ptr<StreamBacklog>& stream) {
  if (std::exchange(t_given.wants_stream, false)) t_given.stream = stream;
}

std::shared_ptr<StreamBacklog> GivenResponse::TakeStream() {
  t_given.wants_stream = false;
  t_given.bytes = 0;
  return std::move(t_given.stream);
}

}  // namespace pytriton::guard
