// Keeps answers for requests that come again. Knows bytes, not Triton: tests run it without a server.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pytriton {

struct CachedOutput {
  std::string name;
  uint32_t dtype = 0;
  std::vector<int64_t> dims;
  std::string data;
};

struct CachedParameter {
  std::string key;
  uint32_t type = 0;
  std::string text;    // of a string value
  uint64_t value = 0;  // of any other
};

// The whole answer to one request.
struct CachedResponse {
  std::vector<CachedOutput> outputs;
  std::vector<CachedParameter> parameters;
};

// Everything that an answer depends on, as bytes: two requests are the same if these bytes are the same. They begin
// with the owner's number, see `ModelCache`.
struct Question {
  std::string bytes;
  std::vector<uint64_t> payloads;  // where the payload of each input begins, in the order of the request
  uint64_t hash = 0;  // the hash of the bytes; 0 if not computed yet

  void AddNumber(uint64_t number) { bytes.append(reinterpret_cast<const char*>(&number), sizeof(number)); }
  void AddText(std::string_view text) {
    AddNumber(text.size());
    bytes.append(text);
  }
};

// Keeps answers within a budget of memory, and drops those first that were not asked for the longest. Any thread may
// use it.
class ResponseCache {
 public:
  // What an answer and its question take besides their bytes.
  static constexpr uint64_t kEntryBytes = 320;
  static constexpr uint64_t kOutputBytes = sizeof(CachedOutput);
  static constexpr uint64_t kParameterBytes = sizeof(CachedParameter);

  explicit ResponseCache(uint64_t budget);
  // The cache that all models of this library share. It is destroyed with the last of them; its budget is the largest
  // that one of them has named.
  static std::shared_ptr<ResponseCache> OfLibrary(uint64_t budget);

  // Whether a question of so many bytes, alone or with its answer, may be kept.
  bool Fits(uint64_t bytes) const { return bytes <= budget_.load(std::memory_order_relaxed) - kEntryBytes; }
  // Returns null if there is no answer.
  std::shared_ptr<const CachedResponse> Find(Question* question);
  // Keeps an answer unless it does not fit. It replaces an earlier answer to the same question.
  void Keep(Question question, CachedResponse response);
  // Drops all answers of an owner.
  void Forget(uint64_t owner);

  uint64_t used_bytes() const;
  size_t size() const;

 private:
  struct Entry {
    Question question;
    std::shared_ptr<const CachedResponse> response;
    uint64_t bytes;
  };
  using Entries = std::list<Entry>;
  struct Key {
    uint64_t hash;
    std::string_view bytes;
    bool operator==(const Key& other) const { return hash == other.hash && bytes == other.bytes; }
  };
  struct HashOf {
    size_t operator()(const Key& key) const { return static_cast<size_t>(key.hash); }
  };

  void Hash(Question* question) const;
  void DropLocked(Entries::iterator entry);

  const uint64_t secret_[2];  // a random key, so that nobody outside of the process can provoke collisions
  std::atomic<uint64_t> budget_;
  mutable std::mutex mutex_;
  Entries entries_;  // the one asked for last comes first
  std::unordered_map<Key, Entries::iterator, HashOf> places_;  // the keys point into the entries
  uint64_t used_bytes_ = 0;
};

// Is told what became of each question, and how long it took.
class CacheCounter {
 public:
  virtual ~CacheCounter() = default;
  virtual void Hit(uint64_t ns) = 0;
  virtual void Miss(uint64_t ns) = 0;
  // The answer to a question that had none was kept.
  virtual void Kept(uint64_t ns) = 0;
};

// The answers of one loaded model in the cache of the library. When the model is loaded again, or its workers change,
// it begins without answers.
class ModelCache {
 public:
  // `counter` may be null.
  ModelCache(uint64_t budget, std::unique_ptr<CacheCounter> counter);
  ~ModelCache() { cache_->Forget(owner_.load()); }
  ModelCache(const ModelCache&) = delete;
  ModelCache& operator=(const ModelCache&) = delete;

  // The number with which questions begin from now on. `Renew` changes it, so that older answers are not found.
  uint64_t owner() const { return owner_.load(std::memory_order_acquire); }
  // Drops all answers, and does not keep those to requests that are under way.
  void Renew();
  bool Fits(uint64_t bytes) const { return cache_->Fits(bytes); }
  std::shared_ptr<const CachedResponse> Find(Question* question) { return cache_->Find(question); }
  void Keep(Question question, CachedResponse response);
  // Null if nobody counts.
  CacheCounter* counter() const { return counter_.get(); }

 private:
  const std::shared_ptr<ResponseCache> cache_;
  const std::unique_ptr<CacheCounter> counter_;
  std::atomic<uint64_t> owner_;
};

// The number of a question's owner.
uint64_t OwnerOf(const Question& question);

// SipHash-1-3 of some bytes.
uint64_t SipHash(const uint64_t secret[2], std::string_view bytes);
// The same for many bytes, several times faster: four hashes of every fourth word each, and one of the rest.
uint64_t WideSipHash(const uint64_t secret[2], std::string_view bytes);

}  // namespace pytriton
