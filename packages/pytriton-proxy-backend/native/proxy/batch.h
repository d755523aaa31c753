// The requests of one call of Triton, from the gathering of their inputs to the last response.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arena.h"
#include "cost.h"
#include "devices.h"
#include "input_ranks.h"
#include "instance_state.h"
#include "late_ends.h"
#include "record.h"
#include "response_cache.h"
#include "settings.h"
#include "stream_pace.h"
#include "triton_api.h"

namespace pytriton {

// Last responses of requests, with the errors that they bring. Both belong to the list.
using LastResponses = std::vector<std::pair<TRITONBACKEND_Response*, TRITONSERVER_Error*>>;

// Sends them, and leaves the list empty.
void SendLast(LastResponses* responses);

class Batch {
 public:
  // Takes over the requests: each is answered and released exactly once, at the latest by the destructor. As long as it
  // lives, it is counted in `in_flight`. Cancelled streams are ended by `late_ends`, or at
  // once where it is null.
  Batch(
      uint64_t id, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count,
      bool batching, bool decoupled, std::atomic<uint64_t>* in_flight, LateEnds* late_ends);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // What it uses of its instance.
  void Use(const std::shared_ptr<InstanceState>& state) {
    state_ = state;
    ranks = &state->ranks;
    devices = &state->devices;
    if (state->cache) cache = state->cache.get();
  }

  uint64_t id() const { return id_; }
  uint32_t size() const { return static_cast<uint32_t>(items_.size()); }
  uint64_t started_ns() const { return started_ns_; }
  bool finished() const { return open_ == 0; }
  // When the worker was last known to be at it: when it was sent, or gave its last response.
  uint64_t active_ns() const { return active_ns_; }
  // When it was sent, or the worker was through with the one before it.
  uint64_t sent_ns() const { return sent_ns_; }
  // Whether no request of it has had a response yet.
  bool untouched() const { return !touched_; }

  // Fills `source` with views on the memory of the requests. What cannot be read is answered, each request with what is
  // wrong with it alone, and so is what the cache has an answer to; they leave the batch, which is finished where nothing
  // is left. Not for a batch that was sent and may be answered.
  void Collect(BatchSource* source);
  // Copies what lies on devices into the record that was written of `source`, looks at the strings in it, and answers
  // those requests that cannot be read, or whose strings are not what they announce. Where there are any, they leave the
  // batch, the record is void, and this returns false.
  bool CompleteRecord(const BatchSource& source, const BatchLayout& layout, uint8_t* record);
  // Takes the first half of its requests into a batch of their own, of one that no worker can have as a whole. Null where
  // it is a single request. Not for a batch that was sent.
  std::unique_ptr<Batch> SplitOff(uint64_t id);
  // Cuts a batch of requests of different shapes into such as cost no more than the settings allow, which are to be served
  // in the order that is returned; the last of them keeps this batch's place: it is what is left of it. A request that
  // costs more by itself is alone, or refused where the settings say so. Finished where nothing is left. Not for a batch
  // that was sent.
  std::vector<std::unique_ptr<Batch>> CutByCost(
      const Settings& settings, uint64_t overhead, BatchSource* scratch, const std::function<uint64_t()>& next_id);
  // It is the worker's from now on. Returns the time that it noted.
  uint64_t MarkSent();

  // Answers the requests that the record answers. Whatever is wrong with one answer becomes that request's error.
  void Respond(const ResponseRecord& record);
  // Answers every request that is still open with an error.
  void Fail(TRITONSERVER_Error_Code code, const std::string& text);
  // Calls `tell(request)` for each request that was given up, open ones by their callers included, until that has returned
  // true.
  using Tell = std::function<bool(uint32_t)>;
  void PollCancelled(const Tell& tell);
  // Whether the caller of an open request has given it up.
  bool IsCancelled(uint32_t request) const { return IsCancelled(items_[request]); }
  bool IsOpen(uint32_t request) const { return items_[request].open; }
  // Null where there is no such request, or it was given back to Triton.
  TRITONBACKEND_Request* request(uint32_t index) const { return index < size() ? items_[index].request.get() : nullptr; }
  // Gives up every open request that its caller has not, likewise.
  void CancelOpen(const Tell& tell);
  // Looks whose callers take what they were sent. `tell(request, pauses)` is called where that is other than the worker
  // knows, and returns whether it knows now.
  void LookAtPaces(uint64_t most_waiting, int wake_fd, uint64_t now_ns, const std::function<bool(uint32_t, bool)>& tell);
  // Whether a stream of it pauses, so that nothing is to be expected of the worker.
  bool is_paused() const;
  // Ends the streams that are stalled for `limit_ns`, with an error, and gives them up, likewise.
  void EndStalled(
      uint64_t limit_ns, uint64_t now_ns, const std::function<std::string()>& text, const Tell& tell);
  // Makes it one that was never sent, with a number of its own.
  void StartAgain(uint64_t id);

  const InputRanks* ranks = nullptr;  // of the model's inputs, where they are known
  ModelCache* cache = nullptr;  // of the model's answers, where it has one
  Devices* devices = nullptr;   // of the instance, where tensors may lie in the memory of any
  Block input;  // the input block of this batch, until the worker gives it back
  bool input_in_use = false;
  bool expired = false;  // took longer than it may; its requests have their errors
  uint64_t cost = 0;     // where that is counted, and the time that it takes is that of its cost
  bool full = false;     // has as many rows as the model takes
  bool waits = false;    // was sent ahead, to a worker that is at another batch
  uint32_t returns = 0;  // how often a worker was lost before it began with it
  // Whether it counts as an execution although every request has failed, as with Triton's Python backend.
  bool counts_failures = false;
  // Where the last responses go that end the batch, to be sent by whoever made it; they are sent at once where it is null.
  LastResponses* held_back = nullptr;
  std::string loss;      // how the worker that had it before was lost; empty where it is the first that has it

 private:
  // A request that Triton has handed over. Where it was moved away from, there is none: it is released once.
  class OwnRequest {
   public:
    OwnRequest() = default;
    OwnRequest(OwnRequest&& other) noexcept : request_(std::exchange(other.request_, nullptr)) {}
    OwnRequest& operator=(OwnRequest&& other) noexcept {
      request_ = std::exchange(other.request_, nullptr);
      return *this;
    }
    OwnRequest& operator=(TRITONBACKEND_Request* request) noexcept {
      request_ = request;
      return *this;
    }
    TRITONBACKEND_Request* get() const { return request_; }
    operator TRITONBACKEND_Request*() const { return request_; }

   private:
    TRITONBACKEND_Request* request_ = nullptr;
  };

  struct Item {
    OwnRequest request;
    TRITONBACKEND_ResponseFactory* factory;  // of a decoupled model, null where the server has made none
    uint32_t rows;
    bool open;
    bool success;
    bool cancelled;
    bool is_told;  // the worker knows that it is cancelled
    bool ended;  // its last response, or what stands for it, is with Triton
    bool rescheduled;  // goes back to Triton's scheduler, without a last response
    bool asked;  // the cache was asked for an answer
    bool cached;  // and had it
    bool given_up;  // with an error, while the worker was at it
    std::unique_ptr<StreamPace> pace;  // of a stream, where it is known
    std::unique_ptr<Question> question;  // to which the answer may be kept; its inputs are read there
  };

  // Without requests, and else as another one.
  Batch(uint64_t id, const Batch& like);
  bool CollectRequest(const Item& item, BatchSource* source, std::string* error);
  void CollectTensors(BatchSource* source);
  // The request that was collected last, whose inputs are the last views. Answers it where the cache can, and has its
  // inputs read from its question from then on where it may be able to later.
  bool AnswerFromCache(Item* item, const BatchSource& source);
  // The question that this request puts to the cache; null where answers to it are not to be kept.
  std::unique_ptr<Question> QuestionOf(const BatchSource& source) const;
  void SendCached(Item* item, const CachedResponse& cached);
  // Answers an open request of a batch that no worker has; `DropRefused` lets all of them go.
  void RefuseOne(Item& item, TRITONSERVER_Error_Code code, const std::string& reason);
  void DropRefused();
  TRITONBACKEND_Response* NewResponse(Item& item, std::string* error);
  // Whether the caller of a stream has gone, so that nothing is to be sent to it.
  bool IsGone(const Item& item) const;
  bool IsCancelled(const Item& item) const;
  static bool MarksSequence(const Item& item);
  void SendError(Item& item, TRITONSERVER_Error_Code code, const std::string& text, bool last = true);
  // Sends a response, the last one of its request only when `Finish` is through with that. Takes both over.
  void Send(TRITONBACKEND_Response* response, bool last, TRITONSERVER_Error* error);
  // Sends a response of a stream, and learns from the first one which stream it is.
  void SendToStream(Item& item, TRITONBACKEND_Response* response, uint64_t bytes);
  // Gives a request back to Triton, which is to schedule it anew where `item.rescheduled`.
  void Release(Item& item);
  // Sees to the end of the requests that have their last response: statistics, release, and that response. In this
  // order: the caller whom the response wakes then finds everything done.
  void Finish(uint64_t compute_end_ns);

  // Calls `report` with the instance, for its statistics, as long as it is there.
  template <typename Report>
  void ReportTo(const Report& report) {
    if (state_ == nullptr) return report(instance_);
    state_->WhileThere([&] { report(instance_); });
  }

  uint64_t id_;
  TRITONBACKEND_ModelInstance* instance_;
  std::shared_ptr<InstanceState> state_;
  bool batching_;
  bool decoupled_;
  LateEnds* const late_ends_;
  std::atomic<uint64_t>* const in_flight_;
  std::vector<Item> items_;
  LastResponses last_responses_;
  uint32_t open_;
  uint64_t started_ns_;
  uint64_t sent_ns_ = 0;
  uint64_t active_ns_ = 0;
  bool touched_ = false;
  bool reported_ = false;
};

}  // namespace pytriton
