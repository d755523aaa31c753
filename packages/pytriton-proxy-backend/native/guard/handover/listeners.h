// The listening sockets of the server. The process that started the server (the starter) gets a copy of each and hands
// it to the next server, so that both share one queue of connections. A byte in shared memory says which of the two
// serves.
#pragma once

#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../shared.h"

namespace pytriton::guard {

class Listeners {
 public:
  // Reads from the environment where the starter has put a channel and a page of shared memory. The page holds the byte
  // and others behind it (handover.py has the list), and the channel holds the sockets of the server before this one.
  // Without them, the guard reports no sockets and accepts all connections. If the handover is switched off, the guard
  // still uses the page, whose other bytes it needs, but not the sockets.
  void Start(bool is_on);

  // Replaces a socket that is about to be bound by the socket of the server before this one for the same address.
  // Returns false if there is none.
  bool Adopt(int fd, const sockaddr* address, socklen_t length);
  // Sends the starter a copy of a socket that listens.
  void OnListen(int fd);
  void OnClose(int fd);

  bool Has(int fd) const;
  // Whether a program of ours has started the server. The server ends with that program.
  bool has_starter() const { return channel_ >= 0; }
  bool accepts() const { return role() == kServing; }
  // Whether the starter is testing which protections are in force. Requests that are refused meanwhile are those of the
  // test.
  bool is_tried() const { return page_ != nullptr && page_[kTriedPlace].load(std::memory_order_relaxed) != 0; }
  // Whether the starter's script has bound all of its models, so that no further model will be loaded.
  bool is_complete() const { return page_ != nullptr && page_[kCompletePlace].load(std::memory_order_relaxed) != 0; }
  // Whether the server is about to end and takes no more requests for inference. The starter sets this first and then
  // waits until the count of requests is 0, so a request has to be counted before this is asked.
  bool is_ending() const { return page_ != nullptr && page_[kEndingPlace].load(std::memory_order_seq_cst) != 0; }
  void CountRequest() {
    if (page_ != nullptr) requests().fetch_add(1, std::memory_order_seq_cst);
  }
  void EndRequest() {
    if (page_ != nullptr) requests().fetch_sub(1, std::memory_order_release);
  }
  // Whether the next server answers the requests that callers still send, so that their connections here are to be
  // closed.
  bool has_left() const { return role() == kLeft; }

 private:
  static constexpr size_t kMost = 16;
  static_assert(kRequestsPlace % sizeof(uint32_t) == 0 && std::atomic<uint32_t>::is_always_lock_free);
  std::atomic<uint32_t>& requests() { return *reinterpret_cast<std::atomic<uint32_t>*>(page_ + kRequestsPlace); }
  Role role() const {
    return page_ == nullptr || !is_on_ ? kServing : static_cast<Role>(page_[kRolePlace].load(std::memory_order_acquire));
  }

  int channel_ = -1;
  bool is_on_ = true;
  std::atomic<bool> has_bound_{false};
  std::atomic<uint8_t>* page_ = nullptr;
  std::array<int, kMost> given_{};  // by the starter, and not taken; -1 elsewhere
  std::array<std::atomic<int>, kMost> listening_{};
};

}  // namespace pytriton::guard
