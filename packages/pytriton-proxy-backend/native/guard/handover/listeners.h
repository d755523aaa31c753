// The sockets at which the server listens. The process that has started it gets a copy of each, and hands it to the
// server that is to follow, so that both have one queue of connections; a byte says which of them serves.
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
  // Takes what the starter has given out of the environment: a channel, a page with the byte and others behind
  // it (handover.py has the list), and in the channel the sockets of the server before this one. Without it nothing is told, and all connections are accepted.
  // Where the part is switched off, the page is taken all the same, as it says more than whose turn it is; the sockets are not.
  void Start(bool is_on);

  // Puts the socket of the server before this one in the place of one that is about to be bound to the same address;
  // false where there is none.
  bool Adopt(int fd, const sockaddr* address, socklen_t length);
  // Tells the starter of a socket that listens.
  void OnListen(int fd);
  void OnClose(int fd);

  bool Has(int fd) const;
  // Whether a program of ours has started the server, and it is to end with that.
  bool has_starter() const { return channel_ >= 0; }
  bool accepts() const { return role() == kServing; }
  // Whether the starter tries out what is in force: what is refused meanwhile is its own.
  bool is_tried() const { return page_ != nullptr && page_[kTriedPlace].load(std::memory_order_relaxed) != 0; }
  // Whether its script has bound all of its models: no other is about to come.
  bool is_complete() const { return page_ != nullptr && page_[kCompletePlace].load(std::memory_order_relaxed) != 0; }
  // Whether the server is to end, and takes no more requests for inference. The starter says so first, and then waits until
  // there are none: so a request is counted before this is asked.
  bool is_ending() const { return page_ != nullptr && page_[kEndingPlace].load(std::memory_order_seq_cst) != 0; }
  void CountRequest() {
    if (page_ != nullptr) requests().fetch_add(1, std::memory_order_seq_cst);
  }
  void EndRequest() {
    if (page_ != nullptr) requests().fetch_sub(1, std::memory_order_release);
  }
  // Whether what callers still ask over their connections is to be answered by the server that follows.
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
