// The socket of one model version and the workers behind it: who gets which batch, and who waits for what.
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

#include "connection.h"
#include "late_ends.h"
#include "response_cache.h"
#include "settings.h"

namespace pytriton {

constexpr uint64_t kMillisecond = 1000 * 1000;
// While requests are in flight: how late a cancellation, or the end of a batch's time, may be seen.
constexpr uint64_t kBusyTickNs = 20 * kMillisecond;

class Endpoint : private ConnectionOwner {
 public:
  Endpoint(ModelIdentity model, Settings settings);
  ~Endpoint() override;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Lets workers call into the server. Before `Listen`.
  void OfferCalls(std::unique_ptr<CallService> calls) { calls_ = std::move(calls); }
  // Turns the response cache on. Called before `Listen`.
  void UseCache(std::unique_ptr<ModelCache> cache) { cache_ = std::move(cache); }
  // Null where there is none.
  ModelCache* cache() const { return cache_.get(); }
  // Binds the socket and starts to accept workers. False with the reason.
  bool Listen(std::string* error);
  const Settings& settings() const { return settings_; }
  // Calls `use` with a request of a batch in flight, where there is one; it lasts as long as that takes.
  void UseRequest(uint64_t batch, uint32_t index, const std::function<void(TRITONBACKEND_Request*)>& use);
  // Says why there may be no worker, in errors of requests that have waited for one; empty where nothing is known.
  void SetAbsence(const std::string& reason);
  // Whether a worker takes batches, or did so a moment ago.
  bool IsReady();
  // An error where the model says of itself that it is not ready; `instance` names it there.
  TRITONSERVER_Error* CheckModel(const std::string& instance) { return calls_ ? calls_->CheckReady(instance) : nullptr; }

  // One call of Triton: hands the batch to an idle worker, and returns when another batch could be handed over, so
  // that Triton's batcher goes on collecting until then. Answers the batch with an error where no worker takes it.
  void Execute(std::unique_ptr<Batch> batch);

  // Counts the batches that are not answered, wherever they are.
  std::atomic<uint64_t>* in_flight() { return &in_flight_; }
  LateEnds* late_ends() { return &late_ends_; }
  uint64_t NextBatchId() { return next_batch_.fetch_add(1, std::memory_order_relaxed); }

 private:
  // A list never changes: who has one may look at its connections without a lock, and keeps them alive.
  using Connections = std::vector<std::shared_ptr<Connection>>;
  // A batch without a worker: its worker was lost, or none has been there since it came.
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
  // Hands the orphans to idle workers, as far as there are any. False where one of these has no room.
  bool Redeliver();
  void PutBack(Orphan orphan);
  // Takes the next orphan: what lost workers have left goes before what no worker has had.
  bool TakeOrphan(Orphan* orphan);
  // Makes a batch for which there is no worker an orphan. False where more than `most` requests would wait; 0 is any number.
  bool SetAside(std::unique_ptr<Batch>* batch, uint64_t most);
  // Lets the parts of a batch wait for workers in their order, behind what waits already.
  void Line(std::vector<std::unique_ptr<Batch>>* parts);
  // Tells the workers that are asleep that a batch waits.
  void Wake(const Connections& connections);
  // Answers the orphans that have waited as long as they may.
  void GiveUpOrphans();
  void Refuse(Batch* batch, TRITONSERVER_Error_Code code, const std::string& text) const;
  void NoWorker(Batch* batch);

  // Removes what is left at the socket's path. False where that is another server's, or no socket.
  bool MakeWay(std::string* error) const;
  bool Bind(std::string* error);
  void Run();  // the background thread: accepts, and reads whatever no Execute reads
  // Waits for what is there to do, and does it; false at the end.
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
  // The idle worker with the least to do, claimed, or the only one where it takes a batch ahead; null where there is none.
  std::shared_ptr<Connection> ClaimIdle(const Connections& connections);
  // Reads the sockets of workers until `done(connections)`, which is called with mutex_ held, or the deadline. One
  // thread at a time polls, the others wait for what it finds.
  template <typename Done>
  bool WaitFor(uint64_t deadline_ns, const Done& done);
  // One round of that: waits until a socket is readable, or the only worker nearly done, for `timeout_ns` at most.
  void Poll(const Connections& connections, uint64_t timeout_ns, uint64_t* tick_ns);
  void SetTimer(const Connections& connections);
  // Looks for the answer to a batch a moment long, without sleeping.
  void LookForAnswer(Connection* worker);

  const ModelIdentity model_;
  const Settings settings_;
  std::unique_ptr<CallService> calls_;
  std::unique_ptr<ModelCache> cache_;
  CostPace cost_pace_;
  std::atomic<uint64_t> next_batch_{1};
  std::atomic<uint64_t> in_flight_{0};
  int listen_fd_ = -1;
  // What the background thread waits for: the listener, the workers' processes and kick_fd_.
  int epoll_fd_ = -1;
  // What it waits for while no Execute polls the workers' sockets: these sockets and epoll_fd_.
  int idle_epoll_fd_ = -1;
  // What the Execute that polls waits for: the workers' sockets, wake_fd_ and timer_fd_. A message wakes one of the two (see
  // WatchWorker).
  int execute_epoll_fd_ = -1;
  int kick_fd_ = -1;  // wakes the background thread
  int wake_fd_ = -1;  // wakes the Execute that polls
  int timer_fd_ = -1;  // the same, when the only worker is nearly done
  uint64_t timer_ns_ = kNever;  // of whoever polls: for when that is set
  uint64_t inode_ = 0;  // of the socket's file, once it is bound
  std::atomic<bool> stopping_{false};
  // The background thread attends to the workers' sockets, and comes round every few milliseconds by itself.
  std::atomic<bool> sweeping_{false};
  std::atomic<uint64_t> executed_{0};  // calls of Execute
  std::atomic<uint64_t> returned_ns_{0};  // when the last of them returned
  std::atomic<uint32_t> lone_{0};  // how many batches in a row were of a single request, and came after a pause
  std::atomic<bool> answered_soon_{false};  // whether the last of these was answered within the time of `LookForAnswer`
  LateEnds late_ends_{[this] { Signal(kick_fd_); }};
  std::thread thread_;
  // For the background thread: when to accept again after a failure, and when that was logged.
  uint64_t accept_again_ns_ = kNever;
  uint64_t accept_logged_ns_ = 0;

  // Taken while a connection's mutex is held: nothing else is locked under it.
  std::mutex lost_mutex_;
  std::deque<Orphan> orphans_;  // left by lost workers, the oldest first
  std::deque<Orphan> waiting_;  // that no worker has had, the oldest first
  uint64_t waiting_requests_ = 0;
  std::string last_loss_;
  std::string absence_;
  uint64_t last_loss_ns_ = 0;
  std::atomic<bool> has_orphans_{false};  // of either kind
  // Until when batches are set aside as they come.
  std::atomic<uint64_t> drain_until_ns_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  bool polling_ = false;
  std::shared_ptr<const Connections> connections_ = std::make_shared<Connections>();
  uint64_t last_end_ns_ = 0;  // when the last connection ended, or the first could be made
  std::atomic<size_t> next_{0};  // where the search for an idle worker begins
};

}  // namespace pytriton
