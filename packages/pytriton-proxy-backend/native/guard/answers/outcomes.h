// How requests for inference end, counted by model and protocol in memory that is shared with the starter of the server.
//
// Each request has one outcome, whoever answers it: a worker, Triton, a front end or this guard. No lock is taken for one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "generate_answer.h"
#include "generate_errors.h"
#include "../shared.h"
#include "stream_backlog.h"

namespace pytriton::guard {

// What an error of Triton's says, by its code and its text: the codes are fewer than the outcomes.
Outcome OutcomeOfError(int code, std::string_view text);
// What a status of HTTP says, where no error of Triton's is known. Whatever a front end does not hand to Triton, it finds
// wrong: it has no better status for JSON that cannot be read than 500.
Outcome OutcomeOfStatus(int status, bool is_submitted);
// The HTTP status that an answer with `status` should have; 0: the one that it has. `generate` has 400 for whatever fails in a
// model, and each front end 500 for what it cannot read.
int StatusOfOutcome(Outcome outcome, int status);

// The counts, in memory of the starter; nothing is counted where none was given. Two servers, one of which follows the
// other, count in the same memory.
class Outcomes {
 public:
  // Takes what the starter has given out of the environment. Triton can be asked whether there is a model of a name.
  void Start(bool (*exists)(const std::string& model));
  bool are_counted() const { return table_ != nullptr; }

  // A model of that name exists. Names that callers make up get no counts of their own.
  void Learn(std::string_view model) { Find(model, true); }
  void Count(std::string_view model, Protocol protocol, Outcome outcome);

 private:
  friend class RequestOutcome;
  enum State : uint32_t { kFree, kTaken, kReady = kEntryReady };
  static constexpr size_t kModels = kCountedModels;
  static constexpr size_t kMostName = kCountedName;
  static constexpr size_t kProtocols = 2;
  static constexpr size_t kOutcomes = kCountedOutcomes;
  struct alignas(64) Entry {
    std::atomic<uint32_t> state;
    uint32_t name_size;
    char name[kMostName];
    std::atomic<uint64_t> counts[kProtocols][kOutcomes];
  };
  static_assert(sizeof(Entry) == 512 && std::atomic<uint64_t>::is_always_lock_free);

  // Null where there is none of that name, and none can be made.
  Entry* Find(std::string_view model, bool makes);

  // As above; of a name that was not learned, Triton is asked.
  Entry* FindOrNone(const std::string& model);

  Entry* table_ = nullptr;
  bool (*exists_)(const std::string& model) = nullptr;
};

// One request, from when it is whole. Its outcome is counted once: later ones are ignored.
class RequestOutcome {
 public:
  RequestOutcome(Outcomes* outcomes, Protocol protocol, std::string_view model);

  // What Triton has said of it. The first failure stands, whatever a front end makes of it.
  void Note(Outcome outcome);
  // Triton has sent its last response.
  void Conclude() { is_concluded_.store(true, std::memory_order_release); }
  bool is_concluded() const { return is_concluded_.load(std::memory_order_acquire); }
  // What was noted; where nothing was, this.
  Outcome NotedOr(Outcome outcome) const;
  void CountNotedOr(Outcome outcome) { Count(NotedOr(outcome)); }
  void Count(Outcome outcome);

  // For HTTP, used by the thread that serves the connection until the request is in Triton: whether the response is a stream,
  // whether Triton will say how it ends, and whether the caller understands chunks.
  bool is_stream = false;
  // What waits for the caller of a stream. The pointer stays as it is once the request is in Triton.
  std::shared_ptr<StreamBacklog> backlog;
  bool is_submitted = false;
  bool has_chunks = true;
  bool is_post = true;
  // Whether the request is for the page about the server.
  bool is_page = false;
  // No inference: its answer is Triton's, with headers of ours, or without a body.
  bool is_plain = false;
  bool wants_html = false;
  // Whether its answer has no body, and says which methods there are.
  bool is_head = false;
  bool is_options = false;
  // Of its answer, besides those that it has (lines, each with its end).
  std::string headers;
  // What it said, where that is for `generate`.
  std::unique_ptr<GenerateRequest> generate;
  // What it was answered, where the front end's answer to `generate` may be wrong. Made before Triton has the request.
  std::unique_ptr<GenerateResponses> responses;

 private:
  Outcomes* const outcomes_;
  const Protocol protocol_;
  std::string name_;  // of a model that is not known so far
  Outcomes::Entry* const entry_;
  std::atomic<Outcome> noted_{Outcome::kUnknown};
  std::atomic<bool> is_concluded_{false};
  std::atomic<bool> is_counted_{false};
};

// Null where nothing is counted.
std::shared_ptr<RequestOutcome> BeginRequest(Outcomes* outcomes, Protocol protocol, std::string_view model);

}  // namespace pytriton::guard
