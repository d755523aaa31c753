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
  // A new memfd of `size` bytes that can neither shrink nor grow: a peer cannot make a read of it fail with SIGBUS.
  static std::unique_ptr<Segment> Create(uint32_t id, uint64_t size, std::string* error);
  // A peer's memfd; takes `fd` over. Refused unless it is sealed against shrinking and holds `size` bytes.
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

// The arena that this side owns: it allocates here, the peer only reads and says when it is done with a block.
class Arena {
 public:
  explicit Arena(uint64_t budget) : budget_(budget) {}

  enum class Result { kOk, kNeedSegment, kFull };

  // kNeedSegment: nothing free is large enough, AddSegment(length) may help. kFull: the budget does not allow it.
  Result Allocate(uint64_t length, Block* block);
  // A segment that can hold `length` bytes, ready to be announced to the peer. Null with the reason, and `errno`.
  Segment* AddSegment(uint64_t length, std::string* error);
  // False where no such block is in use.
  bool Release(uint32_t segment, uint64_t offset);
  bool IsInUse(uint32_t segment, uint64_t offset) const;

  // Segments without a block in use for `idle_ns`, apart from the smallest needed to start again, leave the arena;
  // their numbers are returned so that the peer can be told.
  std::vector<uint32_t> Trim(uint64_t now_ns, uint64_t idle_ns);

  // Segments without a block in use leave the arena, the first one too; their numbers are returned likewise.
  std::vector<uint32_t> DropUnused();

  uint64_t budget() const { return budget_; }
  uint64_t size() const { return size_; }
  uint64_t in_use() const { return in_use_; }

 private:
  using Spans = std::map<uint64_t, uint64_t>;  // offset -> length
  struct Owned {
    std::unique_ptr<Segment> segment;
    Spans free;  // never adjacent
    Spans used;
    Spans::node_type spare;  // the memory of a span that has gone, for the next
    uint64_t idle_since_ns = 0;
  };

  uint64_t budget_;
  uint64_t size_ = 0;
  uint64_t in_use_ = 0;
  uint32_t next_id_ = 1;
  std::vector<Owned> segments_;
};

// The arena that the peer owns, as it has announced it.
class PeerArena {
 public:
  explicit PeerArena(uint64_t budget) : budget_(budget) {}

  // A segment of `length` bytes that came with `fd`, which is taken over. False with the reason.
  bool Add(uint32_t id, int fd, uint64_t length, std::string* error);
  void Remove(uint32_t id);
  void Clear();
  // The segment that holds a block, null with the reason where there is none. It lasts as long as somebody has it.
  std::shared_ptr<Segment> Find(uint32_t id, uint64_t offset, uint64_t length, std::string* error) const;

 private:
  const uint64_t budget_;
  std::map<uint32_t, std::shared_ptr<Segment>> segments_;
  uint64_t size_ = 0;  // of all of them
};

}  // namespace pytriton
