// The requests of one call of Triton, from the gathering of their inputs to the last response.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../cache/response_cache.h"
#include "../triton/devices.h"
#include "../triton/late_ends.h"
#include "../triton/triton_api.h"
#include "../wire/arena.h"
#include "../wire/record.h"
#include "../wire/settings.h"
#include "cost.h"
#include "input_ranks.h"
#include "instance_state.h"
#include "stream_pace.h"

namespace pytriton {

// Last responses of requests, with their errors. The list owns both.
using LastResponses = std::vector<std::pair<TRITONBACKEND_Response*, TRITONSERVER_Error*>>;

// Sends the responses, and leaves the list empty.
void SendLast(LastResponses* responses);

class Batch {
 public:
  // Takes over the requests. Each is answered and released exactly once, at the latest by the destructor. The batch
  // counts in `in_flight` as long as it lives. `late_ends` ends cancelled streams; if it is null, they are ended at
  // once.
  Batch(
      uint64_t id, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count,
      bool batching, bool decoupled, std::atomic<uint64_t>* in_flight, LateEnds* late_ends);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // Sets the state of its instance, which the batch keeps alive.
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
  // When the worker was last seen to work on the batch: when the batch was sent, or had its last response.
  uint64_t active_ns() const { return active_ns_; }
  // When the batch was sent, or, if it was sent ahead, when the worker finished the one before it.
  uint64_t sent_ns() const { return sent_ns_; }
  // Whether no request of the batch has had a response yet.
  bool untouched() const { return !touched_; }

  // Fills `source` with views of the requests' memory. A request that cannot be read is answered with its own error,
  // and a request that the cache knows is answered from the cache; both leave the batch, which is finished if none is
  // left. Not to be called for a batch that was sent and may be answered.
  void Collect(BatchSource* source);
  // Copies tensors that lie on devices into the record that was made of `source`, and checks the strings in it.
  // Requests that cannot be read, or whose strings do not match their lengths, are answered and leave the batch. If
  // there are any, the record is void and this returns false.
  bool CompleteRecord(const BatchSource& source, const BatchLayout& layout, uint8_t* record);
  // Moves the first half of the requests of a batch that fits no worker into a new batch. Returns null if there is only
  // one request. Not to be called for a batch that was sent.
  std::unique_ptr<Batch> SplitOff(uint64_t id);
  // Cuts a batch into batches that cost no more than the settings allow, and returns them in the order in which they
  // are to be served. The last one is what is left in this object. A request that costs more by itself is alone in its
  // batch, or refused if the settings say so. If nothing is left, this batch is finished. Not to be called for a batch
  // that was sent.
  std::vector<std::unique_ptr<Batch>> CutByCost(
      const Settings& settings, uint64_t overhead, BatchSource* scratch, const std::function<uint64_t()>& next_id);
  // Notes that the worker has the batch from now on. Returns the time that was noted.
  uint64_t MarkSent();

  // Answers the requests that the record has answers for. What is wrong with one answer becomes the error of that
  // request alone.
  void Respond(const ResponseRecord& record);
  // Answers every request that is still open with an error.
  void Fail(TRITONSERVER_Error_Code code, const std::string& text);
  // Calls `tell(request)` for each request whose caller has left, also for open ones, until the call has returned true
  // once.
  using Tell = std::function<bool(uint32_t)>;
  void PollCancelled(const Tell& tell);
  // Whether the caller of an open request has cancelled it.
  bool IsCancelled(uint32_t request) const { return IsCancelled(items_[request]); }
  bool IsOpen(uint32_t request) const { return items_[request].open; }
  // Returns null if there is no such request, or if it was given back to Triton.
  TRITONBACKEND_Request* request(uint32_t index) const { return index < size() ? items_[index].request.get() : nullptr; }
  // Cancels every open request that its caller has not cancelled, and calls `tell` as `PollCancelled` does.
  void CancelOpen(const Tell& tell);
  // Checks which callers read what they were sent. Calls `tell(request, pauses)` if that is not what the worker was
  // told last; it returns whether the worker knows now.
  void LookAtPaces(uint64_t most_waiting, int wake_fd, uint64_t now_ns, const std::function<bool(uint32_t, bool)>& tell);
  // Whether one of its streams pauses, so that the worker may stay silent.
  bool is_paused() const;
  // Ends the streams whose callers have read nothing for `limit_ns` with an error, cancels them, and calls `tell` as
  // above.
  void EndStalled(
      uint64_t limit_ns, uint64_t now_ns, const std::function<std::string()>& text, const Tell& tell);
  // Resets the batch as if it had never been sent, and gives it a new number.
  void StartAgain(uint64_t id);

  const InputRanks* ranks = nullptr;  // ranks of the model's inputs, if known
  ModelCache* cache = nullptr;  // the cache of the model's answers, if it has one
  Devices* devices = nullptr;   // the devices of the instance, if tensors may lie on any
  Block input;  // the block with the inputs of this batch, until the worker gives it back
  bool input_in_use = false;
  bool expired = false;  // took longer than its limit; its requests were answered with errors
  uint64_t cost = 0;     // if costs are counted, and the worker's time stands for this cost
  bool full = false;     // has as many rows as the model takes
  bool waits = false;    // was sent ahead to a worker that works on another batch
  uint32_t returns = 0;  // how many workers were lost before they began with it
  // Whether it counts as an execution even if every request has failed, as with Triton's Python backend.
  bool counts_failures = false;
  // Where the last responses of the batch are collected, for its creator to send. If null, they are sent at once.
  LastResponses* held_back = nullptr;
  std::string loss;      // why the worker before was lost; "" if there was none

 private:
  // A request that Triton has handed over, which is released once. An object that was moved from holds none.
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
    TRITONBACKEND_ResponseFactory* factory;  // set for a decoupled model, unless the server could not make one
    uint32_t rows;
    bool open;
    bool success;
    bool cancelled;
    bool is_told;  // the worker has been told that the request is cancelled
    bool ended;  // its last response was handed to Triton
    bool rescheduled;  // goes back to Triton's scheduler without a last response
    bool asked;  // the cache was asked for the answer
    bool cached;  // the cache had the answer
    bool given_up;  // answered with an error while the worker worked on it
    std::unique_ptr<StreamPace> pace;  // how fast the caller of a stream reads, if known
    std::unique_ptr<Question> question;  // set if the answer may be kept; it holds the inputs
  };

  // Makes a batch without requests that is otherwise like another one.
  Batch(uint64_t id, const Batch& like);
  bool CollectRequest(const Item& item, BatchSource* source, std::string* error);
  void CollectTensors(BatchSource* source);
  // Answers the request that was collected last from the cache if possible. If its answer may be kept later, its inputs
  // are read from its question from now on.
  bool AnswerFromCache(Item* item, const BatchSource& source);
  // Returns the question that this request puts to the cache, or null if its answers may not be kept.
  std::unique_ptr<Question> QuestionOf(const BatchSource& source) const;
  void SendCached(Item* item, const CachedResponse& cached);
  // Answers a request of a batch that no worker has with an error. `DropRefused` then removes all such requests.
  void RefuseOne(Item& item, TRITONSERVER_Error_Code code, const std::string& reason);
  void DropRefused();
  TRITONBACKEND_Response* NewResponse(Item& item, std::string* error);
  // Whether the caller of a stream has left, so that nothing must be sent to it.
  bool IsGone(const Item& item) const;
  bool IsCancelled(const Item& item) const;
  static bool MarksSequence(const Item& item);
  void SendError(Item& item, TRITONSERVER_Error_Code code, const std::string& text, bool last = true);
  // Takes over a response and its error, and sends them. The last response of a request is sent by `Finish`.
  void Send(TRITONBACKEND_Response* response, bool last, TRITONSERVER_Error* error);
  // Sends a response of a stream. The first one tells which connection the stream goes over.
  void SendToStream(Item& item, TRITONBACKEND_Response* response, uint64_t bytes);
  // Gives a request back to Triton. With `item.rescheduled` Triton schedules it again.
  void Release(Item& item);
  // Ends the requests that have their last response: reports statistics, releases the request, and sends the response
  // last, so that everything is done when the caller is woken.
  void Finish(uint64_t compute_end_ns);

  // Calls `report` with the instance for its statistics, unless the instance is gone.
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
