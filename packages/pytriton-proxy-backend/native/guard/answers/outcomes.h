// Counts how requests for inference end, by model and protocol, in memory that is shared with the starter of the
// server.
//
// Each request has one outcome, whether a worker, Triton, a front end or this guard answers it. No lock is taken to
// count it.
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

// The outcome of an error of Triton, by its code and its text, because there are fewer codes than outcomes.
Outcome OutcomeOfError(int code, std::string_view text);
// The outcome of an HTTP status if no error of Triton is known. A request that the front end does not hand to Triton
// counts as wrong: for JSON that cannot be read, the front end has no better status than 500.
Outcome OutcomeOfStatus(int status, bool is_submitted);
// The HTTP status that an answer with `status` should have; 0 to keep it. `generate` answers every failure of a model
// with 400, and both front ends answer what they cannot read with 500.
int StatusOfOutcome(Outcome outcome, int status);

// The counts, in memory of the starter; without such memory nothing is counted. A server and its successor count in the
// same memory.
class Outcomes {
 public:
  // Takes the memory named in the environment. `exists` asks Triton whether there is a model of a name.
  void Start(bool (*exists)(const std::string& model));
  bool are_counted() const { return table_ != nullptr; }

  // Notes that a model of this name exists. Names that callers make up get no counts of their own.
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

  // Returns null if there is no entry of this name, and none can be made.
  Entry* Find(std::string_view model, bool makes);

  // The same, but asks Triton about an unknown name.
  Entry* FindOrNone(const std::string& model);

  Entry* table_ = nullptr;
  bool (*exists_)(const std::string& model) = nullptr;
};

// One request, from the moment when it is complete. Its outcome is counted once; later ones are ignored.
class RequestOutcome {
 public:
  RequestOutcome(Outcomes* outcomes, Protocol protocol, std::string_view model);

  // Notes what Triton reports. The first failure counts, whatever a front end makes of it.
  void Note(Outcome outcome);
  // Triton has sent its last response.
  void Conclude() { is_concluded_.store(true, std::memory_order_release); }
  bool is_concluded() const { return is_concluded_.load(std::memory_order_acquire); }
  // Returns what was noted, or else `outcome`.
  Outcome NotedOr(Outcome outcome) const;
  void CountNotedOr(Outcome outcome) { Count(NotedOr(outcome)); }
  void Count(Outcome outcome);

  // For HTTP; used by the thread that serves the connection until the request is in Triton: whether the response is a
  // stream, whether Triton will report its end, and whether the caller understands chunks.
  bool is_stream = false;
  // What waits for the caller of a stream. The pointer does not change once the request is in Triton.
  std::shared_ptr<StreamBacklog> backlog;
  bool is_submitted = false;
  bool has_chunks = true;
  bool is_post = true;
  // Whether the request is for the page about the server.
  bool is_page = false;
  // The request is no inference: its answer is Triton's, with headers of ours, or without a body.
  bool is_plain = false;
  bool wants_html = false;
  // Whether the answer has no body, and lists the allowed methods.
  bool is_head = false;
  bool is_options = false;
  // Headers (lines with their ends) that the answer gets besides its own.
  std::string headers;
  // The text of a request to `generate`.
  std::unique_ptr<GenerateRequest> generate;
  // The responses, if the front end's answer to `generate` may be wrong. Made before Triton has the request.
  std::unique_ptr<GenerateResponses> responses;

 private:
  Outcomes* const outcomes_;
  const Protocol protocol_;
  std::string name_;  // of a model that is not known yet
  Outcomes::Entry* const entry_;
  std::atomic<Outcome> noted_{Outcome::kUnknown};
  std::atomic<bool> is_concluded_{false};
  std::atomic<bool> is_counted_{false};
};

// Returns null if nothing is counted.
std::shared_ptr<RequestOutcome> BeginRequest(Outcomes* outcomes, Protocol protocol, std::string_view model);

}  // namespace pytriton::guard
