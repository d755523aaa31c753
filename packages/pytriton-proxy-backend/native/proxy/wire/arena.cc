#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "../text/errno_text.h"
#include "protocol.h"

// glibc declares these only after version 2.17, for which release wheels are built.
#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 0x0001U
#define MFD_ALLOW_SEALING 0x0002U
#endif
#ifndef F_ADD_SEALS
#define F_ADD_SEALS 1033
#define F_GET_SEALS 1034
#define F_SEAL_SEAL 0x0001
#define F_SEAL_SHRINK 0x0002
#define F_SEAL_GROW 0x0004
#endif

namespace pytriton {

namespace {

// MFD_NOEXEC_SEAL exists since Linux 6.3; older headers do not define it.
constexpr unsigned kNoexecSeal = 0x8;

int MemoryFile(unsigned flags) { return static_cast<int>(syscall(SYS_memfd_create, "pytriton-arena", flags)); }

uint64_t AlignUp(uint64_t value, uint64_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }

// Adds a span. If `node` is not empty, its memory is used again for the span.
void Put(std::map<uint64_t, uint64_t>::node_type node, uint64_t offset, uint64_t length,
         std::map<uint64_t, uint64_t>* spans) {
  if (node.empty()) {
    spans->emplace(offset, length);
    return;
  }
  node.key() = offset;
  node.mapped() = length;
  spans->insert(std::move(node));
}

}  // namespace

std::unique_ptr<Segment> Segment::Create(uint32_t id, uint64_t size, std::string* error) {
  int fd = MemoryFile(MFD_CLOEXEC | MFD_ALLOW_SEALING);
  // With vm.memfd_noexec set, a system refuses memory that might be executed; memory without that right it allows.
  if (fd < 0 && errno == EACCES) fd = MemoryFile(MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoexecSeal);
  if (fd < 0) {
    const int code = errno;
    *error = Errno("memfd_create");
    errno = code;
    return nullptr;
  }
  if (ftruncate(fd, static_cast<off_t>(size)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int code = errno;
    *error = Errno("ftruncate or F_ADD_SEALS") + " for " + std::to_string(size) + " bytes";
    close(fd);
    errno = code;
    return nullptr;
  }
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int code = errno;
    *error = Errno("mmap") + " of " + std::to_string(size) + " bytes";
    close(fd);
    errno = code;
    return nullptr;
  }
  return std::unique_ptr<Segment>(new Segment(id, fd, static_cast<uint8_t*>(data), size));
}

std::unique_ptr<Segment> Segment::Attach(uint32_t id, int fd, uint64_t size, std::string* error) {
  struct stat status;
  const int seals = fcntl(fd, F_GET_SEALS);
  if (size == 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &status) != 0 ||
      static_cast<uint64_t>(status.st_size) < size) {
    *error = "segment " + std::to_string(id) + " is not a memfd of at least " + std::to_string(size) +
             " bytes that is sealed against shrinking";
    close(fd);
    return nullptr;
  }
  void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    *error = Errno("mmap") + " of " + std::to_string(size) + " bytes";
    close(fd);
    return nullptr;
  }
  auto segment = std::unique_ptr<Segment>(new Segment(id, fd, static_cast<uint8_t*>(data), size));
  segment->CloseFd();
  return segment;
}

Segment::~Segment() {
  munmap(data_, size_);
  CloseFd();
}

void Segment::CloseFd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

int Segment::TakeFd() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

Arena::Result Arena::Allocate(uint64_t length, Block* block) {
  if (length > budget_) return Result::kFull;
  const uint64_t need = AlignUp(std::max<uint64_t>(length, 1), kAlignment);
  for (auto& owned : segments_) {
    for (auto it = owned.free.begin(); it != owned.free.end(); ++it) {
      if (it->second < need) continue;
      const uint64_t offset = it->first;
      const uint64_t rest = it->second - need;
      auto span = owned.free.extract(it);
      if (rest != 0) {
        Put(std::move(span), offset + need, rest, &owned.free);
        span = std::move(owned.spare);
      }
      Put(std::move(span), offset, need, &owned.used);
      in_use_ += need;
      *block = {owned.segment->id(), offset, length, owned.segment->data() + offset};
      return Result::kOk;
    }
  }
  return size_ + need <= budget_ ? Result::kNeedSegment : Result::kFull;
}

Segment* Arena::AddSegment(uint64_t length, std::string* error) {
  uint64_t size = std::max(kFirstSegmentBytes, size_);
  while (size < length && size < (uint64_t{1} << 62)) size *= 2;
  size = AlignUp(std::max(std::min(size, budget_ - size_), length), kAlignment);
  auto segment = Segment::Create(next_id_, size, error);
  if (!segment) return nullptr;
  ++next_id_;
  size_ += size;
  Owned owned;
  owned.segment = std::move(segment);
  owned.free.emplace(0, size);
  segments_.push_back(std::move(owned));
  return segments_.back().segment.get();
}

bool Arena::IsInUse(uint32_t segment, uint64_t offset) const {
  for (const auto& owned : segments_) {
    if (owned.segment->id() == segment) return owned.used.count(offset) != 0;
  }
  return false;
}

bool Arena::Release(uint32_t segment, uint64_t offset) {
  for (auto& owned : segments_) {
    if (owned.segment->id() != segment) continue;
    auto used = owned.used.find(offset);
    if (used == owned.used.end()) return false;
    uint64_t begin = offset;
    uint64_t length = used->second;
    in_use_ -= length;
    auto span = owned.used.extract(used);
    auto after = owned.free.lower_bound(begin);
    if (after != owned.free.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == begin) {
        begin = before->first;
        length += before->second;
        owned.spare = owned.free.extract(before);
      }
    }
    if (after != owned.free.end() && begin + length == after->first) {
      length += after->second;
      owned.spare = owned.free.extract(after);
    }
    Put(std::move(span), begin, length, &owned.free);
    if (owned.used.empty()) owned.idle_since_ns = 0;
    return true;
  }
  return false;
}

std::vector<uint32_t> Arena::DropUnused() {
  std::vector<uint32_t> gone;
  for (auto it = segments_.begin(); it != segments_.end();) {
    if (!it->used.empty()) {
      ++it;
      continue;
    }
    gone.push_back(it->segment->id());
    size_ -= it->segment->size();
    it = segments_.erase(it);
  }
  return gone;
}

std::vector<uint32_t> Arena::Trim(uint64_t now_ns, uint64_t idle_ns) {
  std::vector<uint32_t> gone;
  for (auto it = segments_.begin(); it != segments_.end();) {
    const bool first = it->segment->size() <= kFirstSegmentBytes && it == segments_.begin();
    if (first || !it->used.empty()) {
      it->idle_since_ns = 0;
    } else if (it->idle_since_ns == 0) {
      it->idle_since_ns = now_ns;
    } else if (now_ns - it->idle_since_ns >= idle_ns) {
      gone.push_back(it->segment->id());
      size_ -= it->segment->size();
      it = segments_.erase(it);
      continue;
    }
    ++it;
  }
  return gone;
}

bool PeerArena::Add(uint32_t id, int fd, uint64_t length, std::string* error) {
  if (fd < 0) {
    *error = "it announced a segment without its descriptor";
    return false;
  }
  if (segments_.count(id) != 0 || segments_.size() >= kMaxSegments) {
    *error = "it announced segment " + std::to_string(id) + " twice, or too many segments";
    close(fd);
    return false;
  }
  // Blocks are aligned, so a budget that is not aligned is rounded up.
  const uint64_t budget = std::max(budget_, budget_ + (kAlignment - 1));
  if (length > budget || size_ > budget - length) {
    *error = "with segment " + std::to_string(id) + " of " + std::to_string(length) +
             " bytes its arena would have more than arena_budget_bytes, " + std::to_string(budget_) + "; it has " +
             std::to_string(size_);
    close(fd);
    return false;
  }
  std::shared_ptr<Segment> segment = Segment::Attach(id, fd, length, error);
  if (!segment) return false;
  size_ += length;
  segments_[id] = std::move(segment);
  return true;
}

void PeerArena::Remove(uint32_t id) {
  const auto found = segments_.find(id);
  if (found == segments_.end()) return;
  size_ -= found->second->size();
  segments_.erase(found);
}

void PeerArena::Clear() {
  segments_.clear();
  size_ = 0;
}

std::shared_ptr<Segment> PeerArena::Find(uint32_t id, uint64_t offset, uint64_t length, std::string* error) const {
  const auto found = segments_.find(id);
  if (found != segments_.end() && offset <= found->second->size() && length <= found->second->size() - offset &&
      offset % kAlignment == 0) {
    return found->second;
  }
  *error = "at " + std::to_string(offset) + ", length " + std::to_string(length) + ", of segment " +
           std::to_string(id) + ", outside of its arena";
  return nullptr;
}

}  // namespace pytriton
