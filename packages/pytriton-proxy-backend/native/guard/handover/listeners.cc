#include "listeners.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../protections.h"

namespace pytriton::guard {

namespace {

// A message of one byte that carries one descriptor.
struct DescriptorMessage {
  DescriptorMessage() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  DescriptorMessage(const DescriptorMessage&) = delete;

  char byte = 'L';
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
  msghdr message{};
};

// Receives one descriptor; returns -1 if no more are in the channel.
int ReceiveDescriptor(int channel) {
  DescriptorMessage given;
  if (recvmsg(channel, &given.message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) <= 0) return -1;
  const cmsghdr* header = CMSG_FIRSTHDR(&given.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return -1;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
  return fd;
}

void SendDescriptor(int channel, int fd) {
  DescriptorMessage given;
  cmsghdr* header = CMSG_FIRSTHDR(&given.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  // The result is ignored: a starter that has ended needs no descriptor.
  (void)!sendmsg(channel, &given.message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

void Listeners::Start(bool is_on) {
  is_on_ = is_on;
  given_.fill(-1);
  for (auto& fd : listening_) fd.store(-1, std::memory_order_relaxed);
  const char* text = std::getenv(kHandoverVariable);
  int page = -1;
  if (text == nullptr || std::sscanf(text, "%d,%d", &channel_, &page) != 2) {
    channel_ = -1;
    return;
  }
  unsetenv(kHandoverVariable);
  fcntl(channel_, F_SETFD, FD_CLOEXEC);
  constexpr size_t kPageBytes = kReachedPlace + static_cast<size_t>(Protection::kCount);
  void* mapped = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
  if (mapped != MAP_FAILED) {
    page_ = static_cast<std::atomic<uint8_t>*>(mapped);
    g_reached.store(page_ + kReachedPlace, std::memory_order_relaxed);
  }
  close(page);
  if (!is_on_) return;
  for (int& fd : given_) {
    fd = ReceiveDescriptor(channel_);
    if (fd < 0) break;
  }
}

bool Listeners::Adopt(int fd, const sockaddr* address, socklen_t length) {
  has_bound_.store(true, std::memory_order_relaxed);
  for (int& given : given_) {
    sockaddr_storage bound{};
    socklen_t size = sizeof(bound);
    if (given < 0 || getsockname(given, reinterpret_cast<sockaddr*>(&bound), &size) != 0) continue;
    bool is_same = address->sa_family == bound.ss_family && length >= size;
    if (is_same && bound.ss_family == AF_INET) {
      const auto* mine = reinterpret_cast<const sockaddr_in*>(&bound);
      const auto* wanted = reinterpret_cast<const sockaddr_in*>(address);
      is_same = mine->sin_port == wanted->sin_port && mine->sin_addr.s_addr == wanted->sin_addr.s_addr;
    } else if (is_same && bound.ss_family == AF_INET6) {
      const auto* mine = reinterpret_cast<const sockaddr_in6*>(&bound);
      const auto* wanted = reinterpret_cast<const sockaddr_in6*>(address);
      is_same = mine->sin6_port == wanted->sin6_port &&
                std::memcmp(&mine->sin6_addr, &wanted->sin6_addr, sizeof(in6_addr)) == 0;
    }
    if (!is_same) continue;
    // O_NONBLOCK and other options belong to the socket and not to the descriptor, and the same front end of the server
    // before has set them.
    if (dup3(given, fd, (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0) < 0) return false;
    close(given);
    given = -1;
    return true;
  }
  return false;
}

void Listeners::OnListen(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (channel_ < 0 || !is_on_ || Has(fd) || getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0 ||
      (bound.ss_family != AF_INET && bound.ss_family != AF_INET6)) {
    return;
  }
  for (auto& listening : listening_) {
    int none = -1;
    if (!listening.compare_exchange_strong(none, fd)) continue;
    SendDescriptor(channel_, fd);
    if (has_bound_.load(std::memory_order_relaxed)) Reach(Protection::kReplacement);
    return;
  }
}

void Listeners::OnClose(int fd) {
  for (auto& listening : listening_) {
    int known = fd;
    if (listening.compare_exchange_strong(known, -1)) return;
  }
}

bool Listeners::Has(int fd) const {
  for (const auto& listening : listening_) {
    if (listening.load(std::memory_order_relaxed) == fd) return true;
  }
  return false;
}

}  // namespace pytriton::guard
