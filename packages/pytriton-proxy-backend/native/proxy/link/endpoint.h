// The socket of one model version and the workers behind it. Decides which worker gets a batch, and which thread waits
// for what.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../cache/response_cache.h"
#include "../triton/late_ends.h"
#include "../wire/settings.h"
#include "connection.h"

namespace pytriton {

constexpr uint64_t kMillisecond = 1000 * 1000;
// While requests are in flight, a cancellation or the end of a batch's time is noticed at most so late.
constexpr uint64_t kBusyTickNs = 20 * kMillisecond;

class Endpoint : private ConnectionOwner {
 public:
  Endpoint(ModelIdentity model, Settings settings);
  ~Endpoint() override;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Lets workers call the server. To be called before `Listen`.
  void OfferCalls(std::unique_ptr<CallService> calls) { calls_ = std::move(calls); }
  // Turns the response cache on. To be called before `Listen`.
  void UseCache(std::unique_ptr<ModelCache> cache) { cache_ = std::move(cache); }
  // Null if the model has no cache.
  ModelCache* cache() const { return cache_.get(); }
  // Binds the socket and begins to accept workers. Returns false with the reason.
  bool Listen(std::string* error);
  const Settings& settings() const { return settings_; }
  // Calls `use` with a request of a batch in flight, if there is one, and keeps the request alive meanwhile.
  void UseRequest(uint64_t batch, uint32_t index, const std::function<void(TRITONBACKEND_Request*)>& use);
  // Sets why there may be no worker, for errors of requests that have waited for one; "" if the reason is unknown.
  void SetAbsence(const std::string& reason);
  // Whether a worker takes batches, or did until a moment ago.
  bool IsReady();
  // Returns an error if the model itself reports that it is not ready. The error names `instance`.
  TRITONSERVER_Error* CheckModel(const std::string& instance) { return calls_ ? calls_->CheckReady(instance) : nullptr; }

  // Carries out one call of Triton: sends the batch to an idle worker, and returns when another batch could be sent, so
  // that Triton's batcher collects requests until then. If no worker takes the batch, it is answered with an error.
  void Execute(std::unique_ptr<Batch> batch);

  // Counts the batches without an answer, wherever they are.
  std::atomic<uint64_t>* in_flight() { return &in_flight_; }
  LateEnds* late_ends() { return &late_ends_; }
  uint64_t NextBatchId() { return next_batch_.fetch_add(1, std::memory_order_relaxed); }

 private:
  // A list is never changed, only replaced. Whoever holds one may read it without a lock, and keeps its connections
  // alive.
  using Connections = std::vector<std::shared_ptr<Connection>>;
  // A batch without a worker: its worker was lost, or none has been attached since the batch came.
  struct Orphan {
    std::unique_ptr<Batch> batch;
    uint64_t since_ns;
  };

  void WorkerLost(const std::string& what) override;
  void WorkersChanged() override {
    if (cache_) cache_->Renew();
  }
  void TakeBack(std::unique_ptr<Batch> batch) override;
  void Took(uint64_t cost, uint64_t ns) override { cost_pace_.Took(cost, ns); }
  Activity GetActivity() const override { return {in_flight_.load(), next_batch_.load() - 1}; }
  CallService* calls() const override { return calls_.get(); }
  int wake_fd() const override { return kick_fd_; }
  // Sends orphans to idle workers, as long as there are some. Returns false if one of these workers has no room.
  bool Redeliver();
  void PutBack(Orphan orphan);
  // Takes the next orphan. Batches of lost workers go before those that no worker has had.
  bool TakeOrphan(Orphan* orphan);
  // Makes an orphan of a batch without a worker. Returns false if more than `most` requests would wait; 0 means no
  // limit.
  bool SetAside(std::unique_ptr<Batch>* batch, uint64_t most);
  // Queues the parts of a batch in their order, behind the batches that wait already.
  void Line(std::vector<std::unique_ptr<Batch>>* parts);
  // Tells the workers that are asleep that a batch waits.
  void Wake(const Connections& connections);
  // Answers the orphans that have waited too long with errors.
  void GiveUpOrphans();
  void Refuse(Batch* batch, TRITONSERVER_Error_Code code, const std::string& text) const;
  void NoWorker(Batch* batch);

  // Removes an old file at the socket's path. Returns false if it belongs to another server, or is no socket.
  bool MakeWay(std::string* error) const;
  bool Bind(std::string* error);
  void Run();  // the background thread: accepts workers, and reads whatever no Execute reads
  // Waits for events and handles them. Returns false at the end.
  bool Attend(bool attends_workers, int timeout_ms, bool* sweep);
  void Accept();
  bool WatchWorker(int fd);
  void UnwatchWorker(const Connection& connection);
  void RemoveClosedLocked(uint64_t now_ns);
  void WatchListener(bool watched);
  void Sweep(uint64_t now_ns);
  void Signal(int event_fd);
  void Drain(int event_fd);
  std::shared_ptr<const Connections> connections();
  // Claims the idle worker with the fewest batches, or the only worker if it takes a batch ahead. Returns null if there
  // is none.
  std::shared_ptr<Connection> ClaimIdle(const Connections& connections);
  // Reads the sockets of workers until `done(connections)`, which is called with mutex_ held, is true, or until the
  // deadline. Only one thread polls at a time; the others wait for what it finds.
  template <typename Done>
  bool WaitFor(uint64_t deadline_ns, const Done& done);
  // One round of `WaitFor`: waits until a socket is readable or the only worker is nearly done, for `timeout_ns` at
  // most.
  void Poll(const Connections& connections, uint64_t timeout_ns, uint64_t* tick_ns);
  void SetTimer(const Connections& connections);
  // Polls for the answer to a batch for a short time without sleeping.
  void LookForAnswer(Connection* worker);

  const ModelIdentity model_;
  const Settings settings_;
  std::unique_ptr<CallService> calls_;
  std::unique_ptr<ModelCache> cache_;
  CostPace cost_pace_;
  std::atomic<uint64_t> next_batch_{1};
  std::atomic<uint64_t> in_flight_{0};
  int listen_fd_ = -1;
  // The events of the background thread: the listener, the workers' processes and kick_fd_.
  int epoll_fd_ = -1;
  // Its events while no Execute polls: the workers' sockets and epoll_fd_.
  int idle_epoll_fd_ = -1;
  // The events of the Execute that polls: the workers' sockets, wake_fd_ and timer_fd_. A message wakes one of the two
  // threads (see WatchWorker).
  int execute_epoll_fd_ = -1;
  int kick_fd_ = -1;  // wakes the background thread
  int wake_fd_ = -1;  // wakes the Execute that polls
  int timer_fd_ = -1;  // wakes it when the only worker is nearly done
  uint64_t timer_ns_ = kNever;  // the time to which that timer is set; used by the thread that polls
  uint64_t inode_ = 0;  // of the socket's file, once it is bound
  std::atomic<bool> stopping_{false};
  // The background thread watches the workers' sockets, and wakes every few milliseconds by itself.
  std::atomic<bool> sweeping_{false};
  std::atomic<uint64_t> executed_{0};  // calls of Execute
  std::atomic<uint64_t> returned_ns_{0};  // when the last of them returned
  std::atomic<uint32_t> lone_{0};  // how many batches in a row had a single request and came after a pause
  std::atomic<bool> answered_soon_{false};  // whether the last of them was answered while `LookForAnswer` polled
  LateEnds late_ends_{[this] { Signal(kick_fd_); }};
  std::thread thread_;
  // Of the background thread: when to accept again after a failure, and when that failure was logged.
  uint64_t accept_again_ns_ = kNever;
  uint64_t accept_logged_ns_ = 0;

  // May be locked while a connection's mutex is held; nothing else is locked while this is held.
  std::mutex lost_mutex_;
  std::deque<Orphan> orphans_;  // batches of lost workers, the oldest first
  std::deque<Orphan> waiting_;  // batches that no worker has had, the oldest first
  uint64_t waiting_requests_ = 0;
  std::string last_loss_;
  std::string absence_;
  uint64_t last_loss_ns_ = 0;
  std::atomic<bool> has_orphans_{false};  // whether either list has any
  // Until this time batches are set aside as soon as they come.
  std::atomic<uint64_t> drain_until_ns_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  bool polling_ = false;
  std::shared_ptr<const Connections> connections_ = std::make_shared<Connections>();
  uint64_t last_end_ns_ = 0;  // when the last connection ended, or when workers could first connect
  std::atomic<size_t> next_{0};  // where the search for an idle worker begins
};

}  // namespace pytriton
