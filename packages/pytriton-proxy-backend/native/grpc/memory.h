// The memory of the calls of one connection, counted against the limit of all requests in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace pytriton::grpc {

// The memory of one connection. Any thread may use it without a lock.
class Memory {
 public:
  using Reserve = bool (*)(uint64_t bytes);
  using Release = void (*)(uint64_t bytes);
  // The first `free` bytes of a connection are not counted: most connections need little, and health requests must be
  // answered even when memory is short.
  Memory(Reserve reserve, Release release, uint64_t free) : reserve_(reserve), release_(release), free_(free) {}

  // Returns false, and takes nothing, if the limit leaves no more.
  bool Take(uint64_t bytes) {
    uint64_t before = bytes_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t counted = Counted(before + bytes) - Counted(before);
      if (counted > 0 && !reserve_(counted)) return false;
      if (bytes_.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed)) return true;
      if (counted > 0) release_(counted);
    }
  }
  void Give(uint64_t bytes) {
    const uint64_t before = bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    const uint64_t counted = Counted(before) - Counted(before - bytes);
    if (counted > 0) release_(counted);
  }

 private:
  uint64_t Counted(uint64_t bytes) const { return bytes > free_ ? bytes - free_ : 0; }

  const Reserve reserve_;
  const Release release_;
  const uint64_t free_;
  std::atomic<uint64_t> bytes_{0};
};

// The part of one owner, which is given back when the owner ends.
class Held {
 public:
  explicit Held(Memory* memory) : memory_(memory) {}
  Held(Held&& other) noexcept : memory_(other.memory_), bytes_(std::exchange(other.bytes_, 0)) {}
  Held& operator=(Held&& other) noexcept {
    Shrink(0);
    memory_ = other.memory_;
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~Held() { Shrink(0); }

  // Raises the part to so many bytes. Returns false, and changes nothing, if the limit leaves no more. To be called
  // before memory is taken.
  bool Grow(uint64_t bytes) {
    if (bytes <= bytes_) return true;
    if (!memory_->Take(bytes - bytes_)) return false;
    bytes_ = bytes;
    return true;
  }
  void Shrink(uint64_t bytes) {
    if (bytes >= bytes_) return;
    memory_->Give(bytes_ - bytes);
    bytes_ = bytes;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  Memory* memory_;
  uint64_t bytes_ = 0;
};

}  // namespace pytriton::grpc
