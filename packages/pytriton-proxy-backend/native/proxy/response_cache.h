// Answers that are given again where the same is asked again. Knows bytes, not Triton: tests run it without a server.
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

// All that an answer depends on, byte by byte: two requests are the same where these bytes are. They begin with whose
// question it is, see `ModelCache`.
struct Question {
  std::string bytes;
  std::vector<uint64_t> payloads;  // where the payload of each input begins in the bytes, in the order of the request
  uint64_t hash = 0;  // what the cache has made of the bytes; 0: nothing yet

  void AddNumber(uint64_t number) { bytes.append(reinterpret_cast<const char*>(&number), sizeof(number)); }
  void AddText(std::string_view text) {
    AddNumber(text.size());
    bytes.append(text);
  }
};

// Keeps answers as long as they fit into its budget; those go first that nobody has asked for the longest time. From any
// thread.
class ResponseCache {
 public:
  // What an answer and its question take beyond their bytes.
  static constexpr uint64_t kEntryBytes = 320;
  static constexpr uint64_t kOutputBytes = sizeof(CachedOutput);
  static constexpr uint64_t kParameterBytes = sizeof(CachedParameter);

  explicit ResponseCache(uint64_t budget);
  // The one of this library, which its models share, and which goes with the last of them. Its budget is the largest that
  // one of them has named.
  static std::shared_ptr<ResponseCache> OfLibrary(uint64_t budget);

  // Whether so many bytes of a question, or of that and its answer, may be kept.
  bool Fits(uint64_t bytes) const { return bytes <= budget_.load(std::memory_order_relaxed) - kEntryBytes; }
  // Null where there is no answer.
  std::shared_ptr<const CachedResponse> Find(Question* question);
  // Keeps an answer unless it does not fit. Of two to the same question the last is kept.
  void Keep(Question question, CachedResponse response);
  // Drops the answers to all questions of an owner.
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

  const uint64_t secret_[2];  // nobody outside of the process can aim at the place of a question
  std::atomic<uint64_t> budget_;
  mutable std::mutex mutex_;
  Entries entries_;  // the one that was asked for last comes first
  std::unordered_map<Key, Entries::iterator, HashOf> places_;  // keys refer to the bytes of the entries
  uint64_t used_bytes_ = 0;
};

// Learns what became of questions, and how long that took.
class CacheCounter {
 public:
  virtual ~CacheCounter() = default;
  virtual void Hit(uint64_t ns) = 0;
  virtual void Miss(uint64_t ns) = 0;
  // An answer to a question that was missed is kept.
  virtual void Kept(uint64_t ns) = 0;
};

// The answers of one loaded model in the cache of the library. They are its own: a model that is loaded again, or whose
// workers change, begins without any.
class ModelCache {
 public:
  // `counter` may be null.
  ModelCache(uint64_t budget, std::unique_ptr<CacheCounter> counter);
  ~ModelCache() { cache_->Forget(owner_.load()); }
  ModelCache(const ModelCache&) = delete;
  ModelCache& operator=(const ModelCache&) = delete;

  // The number that questions begin with from now on. `Renew` changes it, so that no older answer is found.
  uint64_t owner() const { return owner_.load(std::memory_order_acquire); }
  // Drops all answers, those included to requests that are being answered.
  void Renew();
  bool Fits(uint64_t bytes) const { return cache_->Fits(bytes); }
  std::shared_ptr<const CachedResponse> Find(Question* question) { return cache_->Find(question); }
  void Keep(Question question, CachedResponse response);
  // Null where nobody counts.
  CacheCounter* counter() const { return counter_.get(); }

 private:
  const std::shared_ptr<ResponseCache> cache_;
  const std::unique_ptr<CacheCounter> counter_;
  std::atomic<uint64_t> owner_;
};

// Whose question it is.
uint64_t OwnerOf(const Question& question);

// SipHash-1-3 of some bytes.
uint64_t SipHash(const uint64_t secret[2], std::string_view bytes);
// The same of many bytes, several times as fast: of the hashes of every fourth word, and of what is left.
uint64_t WideSipHash(const uint64_t secret[2], std::string_view bytes);

}  // namespace pytriton
