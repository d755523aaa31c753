#include "http_threads.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <mutex>
#include <numeric>
#include <vector>

namespace pytriton::guard {
namespace {

// More than one message (17 bytes) for each pipe, so that no such pipe is chosen while another one has a small number.
constexpr int kBusy = 64;
constexpr int kFull = 128;

// Each thread gets so many connections before another one is used.
constexpr size_t kFilled = 4;

bool IsPipe(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

ThreadLoad* NewLoad() {
  static std::mutex mutex;
  static auto* const loads = new std::deque<ThreadLoad>;  // threads run until the end of the process
  const std::lock_guard<std::mutex> lock(mutex);
  return &loads->emplace_back(0);
}

}  // namespace

void HttpThreads::OnAccept(int connection) {
  connection_ = connection;
  // The thread is chosen before the search, because other threads close connections during it.
  const Thread* const chosen = Choose();
  chosen_pipe_ = chosen == nullptr ? -1 : chosen->pipe;
}

const HttpThreads::Thread* HttpThreads::Choose() const {
  // Each number is read once, because other threads close connections meanwhile.
  std::vector<int> loads;
  for (const Thread& thread : threads_) loads.push_back(thread.load->load(std::memory_order_relaxed));
  const int all = std::accumulate(loads.begin(), loads.end(), 0);
  const size_t used = std::min(std::max(least_, static_cast<size_t>(all) / kFilled + 1), loads.size());
  const auto fewest = std::min_element(loads.begin(), loads.begin() + static_cast<std::ptrdiff_t>(used));
  return used == 0 ? nullptr : &threads_[static_cast<size_t>(fewest - loads.begin())];
}

std::optional<HttpThreads::Answer> HttpThreads::Ask(int pipe) {
  auto asked =
      std::find_if(threads_.begin(), threads_.end(), [pipe](const Thread& thread) { return thread.pipe == pipe; });
  if (chosen_pipe_ < 0) {
    // The first connection goes to the first thread. No pipe is reported as empty, so that the search passes all of
    // them.
    if (asked != threads_.end() || !IsPipe(pipe)) return std::nullopt;
    threads_.push_back({pipe, NewLoad()});
    return threads_.size() == 1 ? Answer{kBusy, threads_.front().load} : Answer{kFull, nullptr};
  }
  if (asked == threads_.end()) return std::nullopt;
  if (pipe != chosen_pipe_) return Answer{kFull, nullptr};
  connection_ = -1;
  return Answer{0, asked->load};
}

}  // namespace pytriton::guard
