// Shared memory between the proxy and one worker: a list of sealed memfd segments, each with one owner.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace pytriton {

// A mapped memfd. The owner keeps the descriptor until it has been passed on.
class Segment {
 public:
  // Makes a memfd of `size` bytes that can neither shrink nor grow, so that a peer cannot cause SIGBUS in whoever reads
  // it.
  static std::unique_ptr<Segment> Create(uint32_t id, uint64_t size, std::string* error);
  // Maps the memfd of a peer and takes `fd` over. Refuses one that can shrink or holds fewer than `size` bytes.
  static std::unique_ptr<Segment> Attach(uint32_t id, int fd, uint64_t size, std::string* error);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint32_t id() const { return id_; }
  uint64_t size() const { return size_; }
  uint8_t* data() const { return data_; }
  int fd() const { return fd_; }
  void CloseFd();
  // Hands the descriptor to the caller.
  int TakeFd();

 private:
  Segment(uint32_t id, int fd, uint8_t* data, uint64_t size) : id_(id), fd_(fd), data_(data), size_(size) {}

  uint32_t id_;
  int fd_;
  uint8_t* data_;
  uint64_t size_;
};

struct Block {
  uint32_t segment = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint8_t* data = nullptr;
};

// The arena that this side owns. This side allocates blocks; the peer only reads them, and says when it is done with
// one.
class Arena {
 public:
  explicit Arena(uint64_t budget) : budget_(budget) {}

  enum class Result { kOk, kNeedSegment, kFull };

  // Returns kNeedSegment if no free block is large enough but AddSegment(length) may make one, kFull if the budget
  // forbids it.
  Result Allocate(uint64_t length, Block* block);
  // Makes a segment for `length` bytes, which the peer must be told of. Returns null with the reason, and sets `errno`.
  Segment* AddSegment(uint64_t length, std::string* error);
  // Returns false if no such block is in use.
  bool Release(uint32_t segment, uint64_t offset);
  bool IsInUse(uint32_t segment, uint64_t offset) const;

  // Removes the segments that had no block in use for `idle_ns`, but keeps the smallest one to start again with.
  // Returns the numbers of the removed segments, so that the peer can be told.
  std::vector<uint32_t> Trim(uint64_t now_ns, uint64_t idle_ns);

  // Removes all segments without a block in use, and returns their numbers.
  std::vector<uint32_t> DropUnused();

  uint64_t budget() const { return budget_; }
  uint64_t size() const { return size_; }
  uint64_t in_use() const { return in_use_; }

 private:
  using Spans = std::map<uint64_t, uint64_t>;  // offset -> length
  struct Owned {
    std::unique_ptr<Segment> segment;
    Spans free;  // no two of them adjoin
    Spans used;
    Spans::node_type spare;  // the memory of a removed span, used again for the next one
    uint64_t idle_since_ns = 0;
  };

  uint64_t budget_;
  uint64_t size_ = 0;
  uint64_t in_use_ = 0;
  uint32_t next_id_ = 1;
  std::vector<Owned> segments_;
};

// The arena that the peer owns, as the peer has announced it.
class PeerArena {
 public:
  explicit PeerArena(uint64_t budget) : budget_(budget) {}

  // Adds a segment of `length` bytes and takes over `fd`, which came with it. Returns false with the reason.
  bool Add(uint32_t id, int fd, uint64_t length, std::string* error);
  void Remove(uint32_t id);
  void Clear();
  // Returns the segment that holds a block, or null with the reason. A segment lives as long as somebody holds it.
  std::shared_ptr<Segment> Find(uint32_t id, uint64_t offset, uint64_t length, std::string* error) const;

 private:
  const uint64_t budget_;
  std::map<uint32_t, std::shared_ptr<Segment>> segments_;
  uint64_t size_ = 0;  // of all segments
};

}  // namespace pytriton
