#include "response_cache.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

namespace pytriton {

namespace {

uint64_t RandomNumber() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

uint64_t NextOwner() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

uint64_t BytesOf(const CachedResponse& response) {
  uint64_t bytes = 0;
  for (const auto& output : response.outputs) {
    bytes += ResponseCache::kOutputBytes + output.name.size() + output.dims.size() * sizeof(int64_t) + output.data.size();
  }
  for (const auto& parameter : response.parameters) {
    bytes += ResponseCache::kParameterBytes + parameter.key.size() + parameter.text.size();
  }
  return bytes;
}

uint64_t Rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

struct SipState {
  uint64_t v0, v1, v2, v3;

  SipState(uint64_t k0, uint64_t k1)
      : v0(k0 ^ 0x736f6d6570736575u), v1(k1 ^ 0x646f72616e646f6du), v2(k0 ^ 0x6c7967656e657261u),
        v3(k1 ^ 0x7465646279746573u) {}

  void Round() {
    v0 += v1;
    v1 = Rotated(v1, 13) ^ v0;
    v0 = Rotated(v0, 32);
    v2 += v3;
    v3 = Rotated(v3, 16) ^ v2;
    v0 += v3;
    v3 = Rotated(v3, 21) ^ v0;
    v2 += v1;
    v1 = Rotated(v1, 17) ^ v2;
    v2 = Rotated(v2, 32);
  }

  void Add(uint64_t word) {
    v3 ^= word;
    Round();
    v0 ^= word;
  }

  uint64_t End() {
    v2 ^= 0xff;
    for (int i = 0; i < 3; ++i) Round();
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

// For fewer bytes a single hash is as fast.
constexpr size_t kWide = 256;
constexpr size_t kLanes = 4;

}  // namespace

uint64_t SipHash(const uint64_t secret[2], std::string_view bytes) {
  SipState state(secret[0], secret[1]);
  uint64_t word;
  size_t at = 0;
  for (; at + sizeof(word) <= bytes.size(); at += sizeof(word)) {
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    state.Add(word);
  }
  word = 0;
  if (at < bytes.size()) std::memcpy(&word, bytes.data() + at, bytes.size() - at);
  state.Add(word | uint64_t{bytes.size()} << 56);
  return state.End();
}

uint64_t WideSipHash(const uint64_t secret[2], std::string_view bytes) {
  SipState lanes[kLanes] = {
      {secret[0] ^ 1, secret[1]}, {secret[0] ^ 2, secret[1]}, {secret[0] ^ 3, secret[1]}, {secret[0] ^ 4, secret[1]}};
  uint64_t words[kLanes];
  size_t at = 0;
  for (; at + sizeof(words) <= bytes.size(); at += sizeof(words)) {
    std::memcpy(words, bytes.data() + at, sizeof(words));
    for (size_t i = 0; i < kLanes; ++i) lanes[i].Add(words[i]);
  }
  std::string rest(bytes.substr(at));
  for (auto& lane : lanes) {
    const uint64_t hash = lane.End();
    rest.append(reinterpret_cast<const char*>(&hash), sizeof(hash));
  }
  const uint64_t length = bytes.size();
  rest.append(reinterpret_cast<const char*>(&length), sizeof(length));
  return SipHash(secret, rest);
}

uint64_t OwnerOf(const Question& question) {
  uint64_t owner = 0;
  std::memcpy(&owner, question.bytes.data(), std::min(sizeof(owner), question.bytes.size()));
  return owner;
}

ResponseCache::ResponseCache(uint64_t budget)
    : secret_{RandomNumber(), RandomNumber()}, budget_(std::max(budget, kEntryBytes)) {}

std::shared_ptr<ResponseCache> ResponseCache::OfLibrary(uint64_t budget) {
  static auto* const mutex = new std::mutex();
  static auto* const shared = new std::weak_ptr<ResponseCache>();
  const std::lock_guard<std::mutex> lock(*mutex);
  auto cache = shared->lock();
  if (cache == nullptr) {
    cache = std::make_shared<ResponseCache>(budget);
    *shared = cache;
  } else if (budget > cache->budget_) {
    cache->budget_ = budget;
  }
  return cache;
}

void ResponseCache::Hash(Question* question) const {
  if (question->hash != 0) return;
  question->hash = (question->bytes.size() < kWide ? SipHash : WideSipHash)(secret_, question->bytes);
}

std::shared_ptr<const CachedResponse> ResponseCache::Find(Question* question) {
  Hash(question);
  const Key key{question->hash, question->bytes};
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = places_.find(key);
  if (found == places_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->response;
}

void ResponseCache::Keep(Question question, CachedResponse response) {
  const uint64_t bytes = question.bytes.size() + BytesOf(response);
  if (!Fits(bytes)) return;
  question.payloads = {};
  Entries added;  // nodes are made and destroyed without the lock
  Hash(&question);
  added.push_back(
      {std::move(question), std::make_shared<const CachedResponse>(std::move(response)), bytes + kEntryBytes});
  Entries dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  const Key key{added.front().question.hash, added.front().question.bytes};
  const auto found = places_.find(key);
  const auto drop = [&](Entries::iterator entry) {
    DropLocked(entry);
    dropped.splice(dropped.begin(), entries_, entry);
  };
  if (found != places_.end()) drop(found->second);
  used_bytes_ += added.front().bytes;
  while (used_bytes_ > budget_) drop(std::prev(entries_.end()));
  entries_.splice(entries_.begin(), added);
  places_.emplace(key, entries_.begin());
}

void ResponseCache::DropLocked(Entries::iterator entry) {
  places_.erase(Key{entry->question.hash, entry->question.bytes});
  used_bytes_ -= entry->bytes;
}

void ResponseCache::Forget(uint64_t owner) {
  Entries dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (OwnerOf(entry->question) == owner) {
      DropLocked(entry);
      dropped.splice(dropped.begin(), entries_, entry);
    }
    entry = next;
  }
}

uint64_t ResponseCache::used_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_bytes_;
}

size_t ResponseCache::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

ModelCache::ModelCache(uint64_t budget, std::unique_ptr<CacheCounter> counter)
    : cache_(ResponseCache::OfLibrary(budget)), counter_(std::move(counter)), owner_(NextOwner()) {}

void ModelCache::Renew() { cache_->Forget(owner_.exchange(NextOwner(), std::memory_order_acq_rel)); }

void ModelCache::Keep(Question question, CachedResponse response) {
  // A question from before a renewal would never be asked again, so its answer is not kept.
  if (OwnerOf(question) == owner()) cache_->Keep(std::move(question), std::move(response));
}

}  // namespace pytriton
