#include "connections.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <mutex>
#include <new>

namespace pytriton::guard {

bool Connections::Reserve() {
  // Descriptors are numbers from 0 up to a limit; the kernel's own limit is about a million.
  constexpr uint64_t kMost = 4 << 20;
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) files.rlim_max = kMost;
  const size_t count = static_cast<size_t>(std::min<uint64_t>(files.rlim_max, kMost));
  // Pages that are not touched take no memory.
  void* made = mmap(nullptr, count * sizeof(Slot), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return false;
  slots_ = static_cast<Slot*>(made);
  count_ = count;
  return true;
}

void Connections::OnAccept(int fd) {
  Slot* slot = SlotOf(fd);
  if (slot == nullptr) return;
  slot->head.began.store(0, std::memory_order_relaxed);
  slot->interest.Begin();
  slot->mark.store(kFresh, std::memory_order_release);
}

void Connections::Assign(int fd, ThreadLoad* thread) {
  Slot* slot = SlotOf(fd);
  if (slot == nullptr) return;
  thread->fetch_add(1, std::memory_order_relaxed);
  slot->thread.store(thread, std::memory_order_release);
}

Connection* Connections::Find(int fd) {
  Slot* slot = SlotOf(fd);
  if (slot == nullptr) return nullptr;
  const uint8_t mark = slot->mark.load(std::memory_order_acquire);
  if (mark == kNone) return nullptr;
  Connection* connection = slot->connection.load(std::memory_order_relaxed);
  if (mark == kKnown) return connection;
  // A thread may read the first bytes of a connection while another one writes to it.
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  connection = slot->connection.load(std::memory_order_relaxed);
  if (slot->mark.load(std::memory_order_acquire) == kKnown) return connection;
  if (connection == nullptr) {
    connection = new (std::nothrow) Connection;
    if (connection == nullptr) return nullptr;
    slot->connection.store(connection, std::memory_order_relaxed);
  } else {
    *connection = Connection();
  }
  slot->mark.store(kKnown, std::memory_order_release);
  return connection;
}

Connection* Connections::FindKnown(int fd) {
  Slot* slot = SlotOf(fd);
  if (slot == nullptr || slot->mark.load(std::memory_order_acquire) != kKnown) return nullptr;
  return slot->connection.load(std::memory_order_relaxed);
}

Interest* Connections::FindInterest(int fd) {
  Slot* slot = SlotOf(fd);
  return slot == nullptr || slot->mark.load(std::memory_order_acquire) == kNone ? nullptr : &slot->interest;
}

ConnectionName Connections::NameOf(int fd) {
  const Slot* slot = SlotOf(fd);
  if (slot == nullptr || slot->mark.load(std::memory_order_acquire) == kNone) return {};
  return {fd, slot->generation.load(std::memory_order_acquire)};
}

int Connections::DescriptorOf(ConnectionName name) {
  const Slot* slot = SlotOf(name.fd);
  return slot != nullptr && slot->generation.load(std::memory_order_acquire) == name.generation ? name.fd : -1;
}

void Connections::SetRequest(int fd, const TRITONSERVER_InferenceRequest* request) {
  if (Slot* slot = SlotOf(fd); slot != nullptr) slot->request.store(request, std::memory_order_release);
}

const TRITONSERVER_InferenceRequest* Connections::TakeRequest(int fd) {
  Slot* slot = SlotOf(fd);
  return slot == nullptr ? nullptr : slot->request.exchange(nullptr, std::memory_order_acq_rel);
}

Connection* Connections::Remove(int fd) {
  Slot* slot = SlotOf(fd);
  if (slot == nullptr || slot->mark.load(std::memory_order_relaxed) == kNone) return nullptr;
  ThreadLoad* const thread = slot->thread.exchange(nullptr, std::memory_order_acq_rel);
  if (thread != nullptr) thread->fetch_sub(1, std::memory_order_relaxed);
  slot->generation.fetch_add(1, std::memory_order_acq_rel);
  const uint8_t mark = slot->mark.exchange(kNone, std::memory_order_acq_rel);
  return mark == kKnown ? slot->connection.load(std::memory_order_relaxed) : nullptr;
}

}  // namespace pytriton::guard
