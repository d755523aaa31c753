#include "outcomes.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>

#include "../../proxy/triton/triton_api.h"
#include "../../proxy/wire/shared_limits.h"

namespace pytriton::guard {

namespace {

// Texts of Triton's core, which has only one code for everything that is unavailable.
constexpr std::string_view kQueueFullText = "Exceeds maximum queue size";
constexpr std::string_view kQueueTimeoutText = "Request timeout expired";

bool Has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace

Outcome OutcomeOfError(int code, std::string_view text) {
  switch (code) {
    case TRITONSERVER_ERROR_NOT_FOUND:
    case TRITONSERVER_ERROR_INVALID_ARG:
    case TRITONSERVER_ERROR_UNSUPPORTED:
    case TRITONSERVER_ERROR_ALREADY_EXISTS:
      return Outcome::kInvalid;
    case TRITONSERVER_ERROR_CANCELLED:
      return Outcome::kCancelled;
    case TRITONSERVER_ERROR_UNAVAILABLE:
      if (Has(text, kQueueFullText)) return Outcome::kQueueFull;
      if (Has(text, kQueueTimeoutText)) return Outcome::kQueueTimeout;
      if (Has(text, kTimeLimitText)) return Outcome::kTimeLimit;
      if (Has(text, kWorkerLostText)) return Outcome::kWorkerLost;
      return Outcome::kUnavailable;
    default:
      return Outcome::kFailed;
  }
}

Outcome OutcomeOfStatus(int status, bool is_submitted) {
  if (status < 400) return Outcome::kOk;
  if (status == 503) return Outcome::kUnavailable;
  return is_submitted && status >= 500 ? Outcome::kFailed : Outcome::kInvalid;
}

int StatusOfOutcome(Outcome outcome, int status) {
  switch (outcome) {
    case Outcome::kInvalid:
      return status == 500 ? 400 : 0;
    case Outcome::kFailed:
      return status == 400 ? 500 : 0;
    case Outcome::kQueueFull:
    case Outcome::kQueueTimeout:
    case Outcome::kTimeLimit:
    case Outcome::kWorkerLost:
    case Outcome::kUnavailable:
      return status == 400 ? 503 : 0;
    default:
      return 0;
  }
}

void Outcomes::Start(bool (*exists)(const std::string& model)) {
  exists_ = exists;
  const char* const text = std::getenv(kOutcomesVariable);
  if (text == nullptr) return;
  const int fd = std::atoi(text);
  unsetenv(kOutcomesVariable);
  struct stat status{};
  // If the starter has another release, the size of its table differs, and it is not used.
  if (fstat(fd, &status) == 0 && status.st_size == static_cast<off_t>(kModels * sizeof(Entry))) {
    void* const mapped = mmap(nullptr, kModels * sizeof(Entry), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) table_ = static_cast<Entry*>(mapped);
  }
  close(fd);
}

Outcomes::Entry* Outcomes::Find(std::string_view model, bool makes) {
  if (table_ == nullptr || model.empty() || model.size() > kMostName) return nullptr;
  constexpr size_t kNamed = kModels - 1;
  const size_t begin = std::hash<std::string_view>{}(model);
  for (size_t i = 0; i < kNamed; ++i) {
    Entry& entry = table_[1 + (begin + i) % kNamed];
    uint32_t state = entry.state.load(std::memory_order_acquire);
    if (state == kFree) {
      if (!makes) return nullptr;
      if (entry.state.compare_exchange_strong(state, kTaken, std::memory_order_acquire)) {
        entry.name_size = static_cast<uint32_t>(model.size());
        std::memcpy(entry.name, model.data(), model.size());
        entry.state.store(kReady, std::memory_order_release);
        return &entry;
      }
    }
    // An entry whose name is being written by another thread is skipped, even if it may be the same name; readers add
    // entries of one name up.
    if (state == kReady && model == std::string_view(entry.name, entry.name_size)) return &entry;
  }
  return nullptr;
}

Outcomes::Entry* Outcomes::FindOrNone(const std::string& model) {
  Entry* found = Find(model, false);
  if (found == nullptr && !model.empty() && exists_(model)) found = Find(model, true);
  return found == nullptr ? table_ : found;
}

void Outcomes::Count(std::string_view model, Protocol protocol, Outcome outcome) {
  if (table_ != nullptr) RequestOutcome(this, protocol, model).Count(outcome);
}

RequestOutcome::RequestOutcome(Outcomes* outcomes, Protocol protocol, std::string_view model)
    : outcomes_(outcomes), protocol_(protocol), entry_(outcomes->Find(model, false)) {
  if (entry_ == nullptr) name_ = model;
}

void RequestOutcome::Note(Outcome outcome) {
  Outcome none = Outcome::kUnknown;
  noted_.compare_exchange_strong(none, outcome, std::memory_order_acq_rel);
}

Outcome RequestOutcome::NotedOr(Outcome outcome) const {
  const Outcome noted = noted_.load(std::memory_order_acquire);
  return noted == Outcome::kUnknown ? outcome : noted;
}

void RequestOutcome::Count(Outcome outcome) {
  if (!outcomes_->are_counted() || is_counted_.exchange(true, std::memory_order_acq_rel)) return;
  Outcomes::Entry* const entry = entry_ != nullptr ? entry_ : outcomes_->FindOrNone(name_);
  entry->counts[static_cast<size_t>(protocol_)][static_cast<size_t>(outcome)].fetch_add(1, std::memory_order_relaxed);
}

std::shared_ptr<RequestOutcome> BeginRequest(Outcomes* outcomes, Protocol protocol, std::string_view model) {
  if (outcomes == nullptr || !outcomes->are_counted()) return nullptr;
  return std::make_shared<RequestOutcome>(outcomes, protocol, model);
}

}  // namespace pytriton::guard
