// The cache of answers against a plain model of it, and from several threads.
#include <cstring>
#include <list>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../proxy/cache/response_cache.h"
#include "check.h"

using namespace pytriton;

namespace {

Question QuestionOf(uint64_t owner, const std::string& text) {
  Question question;
  question.AddNumber(owner);
  question.AddText(text);
  return question;
}

CachedResponse ResponseOf(const std::string& data) {
  CachedResponse response;
  response.outputs.push_back({"y", 11, {1, static_cast<int64_t>(data.size())}, data});
  response.parameters.push_back({"p", 0, data.substr(0, 3), 7});
  return response;
}

uint64_t BytesOf(const Question& question, const CachedResponse& response) {
  uint64_t bytes = question.bytes.size() + ResponseCache::kEntryBytes;
  for (const auto& output : response.outputs) {
    bytes += ResponseCache::kOutputBytes + output.name.size() + output.dims.size() * 8 + output.data.size();
  }
  for (const auto& parameter : response.parameters) {
    bytes += ResponseCache::kParameterBytes + parameter.key.size() + parameter.text.size();
  }
  return bytes;
}

// Those that were asked for last come first, as in the cache.
struct Model {
  struct Entry {
    std::string question;
    std::string data;
    uint64_t bytes;
  };
  std::list<Entry> entries;
  uint64_t used = 0;

  std::list<Entry>::iterator Find(const std::string& question) {
    auto entry = entries.begin();
    while (entry != entries.end() && entry->question != question) ++entry;
    return entry;
  }
};

void AgainstAModel(uint64_t seed, int turns) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t limit) { return random() % limit; };
  const uint64_t budget = 8000;
  ResponseCache cache(budget);
  Model model;
  uint64_t hits = 0;
  for (int turn = 0; turn < turns; ++turn) {
    const uint64_t owner = 1 + below(3);
    const uint64_t length = below(10) == 0 ? 300 + below(2) : below(8);
    Question question = QuestionOf(owner, std::string(length, static_cast<char>('a' + below(2))));
    const auto known = model.Find(question.bytes);
    if (below(200) == 0) {
      cache.Forget(owner);
      for (auto entry = model.entries.begin(); entry != model.entries.end();) {
        uint64_t its;
        std::memcpy(&its, entry->question.data(), sizeof(its));
        if (its == owner) model.used -= entry->bytes;
        entry = its == owner ? model.entries.erase(entry) : std::next(entry);
      }
    } else if (below(2) == 0) {
      const auto found = cache.Find(&question);
      CHECK((found != nullptr) == (known != model.entries.end()));
      if (found == nullptr) continue;
      ++hits;
      CHECK(found->outputs.size() == 1 && found->outputs[0].data == known->data);
      CHECK(found->parameters.size() == 1 && found->parameters[0].text == known->data.substr(0, 3));
      model.entries.splice(model.entries.begin(), model.entries, known);
    } else {
      // Sometimes more than the whole budget.
      const std::string data(below(20) == 0 ? below(2 * budget) : below(500), static_cast<char>('0' + below(10)));
      const CachedResponse response = ResponseOf(data);
      const uint64_t bytes = BytesOf(question, response);
      cache.Keep(question, response);
      if (bytes > budget) continue;
      if (known != model.entries.end()) {
        model.used -= known->bytes;
        model.entries.erase(known);
      }
      model.used += bytes;
      while (model.used > budget) {
        model.used -= model.entries.back().bytes;
        model.entries.pop_back();
      }
      model.entries.push_front({question.bytes, data, bytes});
    }
    CHECK(cache.used_bytes() == model.used && model.used <= budget);
    CHECK(cache.size() == model.entries.size());
  }
  CHECK(hits > static_cast<uint64_t>(turns) / 50);
}

void FromThreads(int turns) {
  ModelCache one(6000, nullptr), two(6000, nullptr);
  const auto work = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int turn = 0; turn < turns; ++turn) {
      ModelCache& cache = random() % 2 == 0 ? one : two;
      const std::string text(random() % 30, 'a');
      Question question = QuestionOf(cache.owner(), text);
      if (const auto found = cache.Find(&question)) {
        CHECK(found->outputs[0].data == text + (&cache == &one ? "1" : "2"));
      } else {
        cache.Keep(question, ResponseOf(text + (&cache == &one ? "1" : "2")));
      }
      if (random() % 100 == 0) cache.Renew();
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 4; ++i) threads.emplace_back(work, i);
  for (auto& thread : threads) thread.join();
}

void OfOneLibrary() {
  Question question;
  {
    ModelCache one(4000, nullptr), two(8000, nullptr);
    question = QuestionOf(one.owner(), "q");
    one.Keep(question, ResponseOf("one"));
    CHECK(one.Find(&question) != nullptr);
    Question other = QuestionOf(two.owner(), "q");
    CHECK(two.Find(&other) == nullptr);
    CHECK(one.Fits(7000));  // what the other one may
    // What was asked before a renewal is not answered, nor kept.
    one.Renew();
    CHECK(one.Find(&question) == nullptr);
    one.Keep(question, ResponseOf("late"));
    CHECK(one.Find(&question) == nullptr);
  }
  CHECK(ResponseCache::OfLibrary(4000)->size() == 0);
  CHECK(!ResponseCache::OfLibrary(4000)->Fits(4000));
  CHECK(!ResponseCache(1).Fits(1) && ResponseCache(0).Fits(0));
}

// The hash is that of SipHash's authors, with one and three rounds, and another one for each secret.
void Hashes() {
  const uint64_t secret[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  CHECK(SipHash(secret, "") == 0xabac0158050fc4dcu);
  const uint64_t other[2] = {secret[0], secret[1] ^ 1};
  std::map<uint64_t, int> seen;
  std::string text;
  for (int i = 0; i < 1000; ++i, text += '\0') {
    ++seen[SipHash(secret, text)];
    ++seen[SipHash(other, text)];
  }
  CHECK(seen.size() == 2000);
  // Every bit counts, wherever it is, and so does the length.
  std::string wide(1000, 'x');
  for (size_t i = 0; i < wide.size(); ++i) {
    wide[i] ^= 1;
    ++seen[WideSipHash(secret, wide)];
    wide[i] ^= 1;
    ++seen[WideSipHash(secret, std::string_view(wide).substr(0, i))];
  }
  CHECK(seen.size() == 4000);
}

}  // namespace

int main(int, char** arguments) {
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10);
  const int turns = std::atoi(arguments[2]);
  Hashes();
  OfOneLibrary();
  AgainstAModel(seed, turns);
  FromThreads(turns);
  return 0;
}
