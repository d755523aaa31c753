// How requests end: what two servers count in one memory, from many threads, and names that have no room.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "../guard/answers/outcomes.h"
#include "check.h"

namespace {

using pytriton::guard::Outcome;
using pytriton::guard::OutcomeOfError;
using pytriton::guard::OutcomeOfStatus;
using pytriton::guard::Outcomes;
using pytriton::guard::Protocol;
using pytriton::guard::RequestOutcome;

constexpr size_t kEntries = 1024;
constexpr size_t kEntrySize = 512;
constexpr size_t kCounts = 256;

bool HasModel(const std::string& model) { return model == "asked for"; }

// The memory of a starter, which two servers map.
class Memory {
 public:
  Memory() : fd_(memfd_create("outcomes", 0)) {
    CHECK(ftruncate(fd_, kEntries * kEntrySize) == 0);
    data_ = static_cast<uint8_t*>(mmap(nullptr, kEntries * kEntrySize, PROT_READ, MAP_SHARED, fd_, 0));
  }
  void Give() const { setenv("PYTRITON_GUARD_OUTCOMES", std::to_string(dup(fd_)).c_str(), 1); }

  std::map<std::string, uint64_t> Read(Protocol protocol, Outcome outcome) const {
    std::map<std::string, uint64_t> counts;
    for (size_t i = 0; i < kEntries; ++i) {
      const uint8_t* const entry = data_ + i * kEntrySize;
      uint32_t head[2];
      std::memcpy(head, entry, sizeof(head));
      uint64_t count = 0;
      std::memcpy(&count, entry + kCounts + (static_cast<size_t>(protocol) * 16 + static_cast<size_t>(outcome)) * 8, 8);
      if (count > 0) counts[std::string(reinterpret_cast<const char*>(entry + 8), head[1])] += count;
    }
    return counts;
  }

 private:
  const int fd_;
  const uint8_t* data_;
};

void CountsOfTwoServers() {
  const Memory memory;
  Outcomes servers[2];
  for (Outcomes& server : servers) {
    memory.Give();
    server.Start(HasModel);
    CHECK(server.are_counted() && std::getenv("PYTRITON_GUARD_OUTCOMES") == nullptr);
  }
  constexpr int kThreads = 8;
  constexpr int kModels = 20;
  constexpr uint64_t kTimes = 200;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&server = servers[i % 2]] {
      for (uint64_t time = 0; time < kTimes; ++time) {
        for (int model = 0; model < kModels; ++model) {
          const std::string name = "model" + std::to_string(model);
          server.Learn(name);
          server.Count(name, Protocol::kGrpc, Outcome::kQueueFull);
          server.Count("made up" + std::to_string(model), Protocol::kHttp, Outcome::kInvalid);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto counts = memory.Read(Protocol::kGrpc, Outcome::kQueueFull);
  CHECK(counts.size() == kModels);
  for (const auto& [name, count] : counts) CHECK(count == kThreads * kTimes);
  const auto made_up = memory.Read(Protocol::kHttp, Outcome::kInvalid);
  CHECK(made_up.size() == 1 && made_up.at("") == kThreads * kTimes * kModels);
}

void OnceForEachRequest() {
  const Memory memory;
  memory.Give();
  Outcomes outcomes;
  outcomes.Start(HasModel);
  RequestOutcome request(&outcomes, Protocol::kHttp, "asked for");
  request.Note(Outcome::kTimeLimit);
  request.Note(Outcome::kFailed);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&request] { request.CountNotedOr(Outcome::kOk); });
  for (std::thread& thread : threads) thread.join();
  request.Count(Outcome::kCancelled);
  const auto counts = memory.Read(Protocol::kHttp, Outcome::kTimeLimit);
  CHECK(counts.size() == 1 && counts.at("asked for") == 1);
  CHECK(memory.Read(Protocol::kHttp, Outcome::kCancelled).empty());
}

void NamesThatHaveNoRoom() {
  const Memory memory;
  memory.Give();
  Outcomes outcomes;
  outcomes.Start(HasModel);
  const std::string longest(248, 'a');
  outcomes.Learn(longest);
  outcomes.Learn(longest + "a");
  for (size_t i = 0; i < 2 * kEntries; ++i) outcomes.Learn("model" + std::to_string(i));
  for (size_t i = 0; i < 2 * kEntries; ++i) outcomes.Count("model" + std::to_string(i), Protocol::kHttp, Outcome::kOk);
  for (const std::string& name : {longest, longest + "a", std::string()}) {
    outcomes.Count(name, Protocol::kHttp, Outcome::kOk);
  }
  auto counts = memory.Read(Protocol::kHttp, Outcome::kOk);
  CHECK(counts.size() == kEntries && counts.at(longest) == 1);
  // All that are not told apart.
  CHECK(counts.at("") == 2 * kEntries - (kEntries - 2) + 2);
}

void WithoutMemory() {
  Outcomes outcomes;
  outcomes.Start(HasModel);
  outcomes.Learn("model");
  outcomes.Count("model", Protocol::kHttp, Outcome::kOk);
  CHECK(!outcomes.are_counted() && BeginRequest(&outcomes, Protocol::kHttp, "model") == nullptr);
  // Of another release: it is no table of this one.
  setenv("PYTRITON_GUARD_OUTCOMES", std::to_string(memfd_create("other", 0)).c_str(), 1);
  outcomes.Start(HasModel);
  CHECK(!outcomes.are_counted());
}

void Kinds() {
  constexpr int kUnavailable = 4;
  CHECK(OutcomeOfError(kUnavailable, "[request id: 1] Exceeds maximum queue size") == Outcome::kQueueFull);
  CHECK(OutcomeOfError(kUnavailable, "Request timeout expired") == Outcome::kQueueTimeout);
  CHECK(OutcomeOfError(kUnavailable, "no worker is attached") == Outcome::kUnavailable);
  // The texts of a callable are its own.
  CHECK(OutcomeOfError(1, "Exceeds maximum queue size") == Outcome::kFailed);
  CHECK(OutcomeOfError(0, "") == Outcome::kFailed && OutcomeOfError(7, "") == Outcome::kCancelled);
  for (const int code : {2, 3, 5, 6}) CHECK(OutcomeOfError(code, "") == Outcome::kInvalid);
  CHECK(OutcomeOfStatus(200, true) == Outcome::kOk && OutcomeOfStatus(503, false) == Outcome::kUnavailable);
  CHECK(OutcomeOfStatus(500, false) == Outcome::kInvalid && OutcomeOfStatus(500, true) == Outcome::kFailed);
}

}  // namespace

int main() {
  CountsOfTwoServers();
  OnceForEachRequest();
  NamesThatHaveNoRoom();
  WithoutMemory();
  Kinds();
  return 0;
}
