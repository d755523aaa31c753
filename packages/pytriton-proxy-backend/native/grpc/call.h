// The calls of one client: its connection, and what each of its streams asks of Triton.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "framing.h"
#include "http2.h"
#include "inference.h"
#include "memory.h"

namespace pytriton::grpc {

class ClientConnection;
class ForwardedRequests;
class Inner;

// How long a connection may be silent and how old it may get, as the options of Triton's own front end say; zero where
// they say nothing.
struct ConnectionLimits {
  std::chrono::milliseconds keepalive_time{0};
  std::chrono::milliseconds keepalive_timeout{0};
  bool keepalive_without_calls = false;
  std::chrono::milliseconds max_age{0};
  std::chrono::milliseconds max_age_grace{0};
};

// What the names of headers begin with that Triton's option --grpc-restricted-protocol asks for.
constexpr std::string_view kRestrictedHeader = "triton-grpc-protocol-";

// What all calls have in common. Made once, before the first connection.
struct Service {
  // Where the requests go; null before the server is made, and from its end on.
  std::atomic<TRITONSERVER_Server*> server{nullptr};
  // Everything is left to Triton's own front end, as for traces, with a call of ours before it that never cancels.
  std::atomic<bool> forwards_all{false};
  bool forwards_headers = false;  // any of them, for the option --grpc-header-forward-pattern
  bool makes_spans = false;       // Triton's own front end; see ../guard/trace_flag.h
  std::shared_mutex server_mutex;  // shared by who hands a request to it
  Inner* inner = nullptr;
  ForwardedRequests* forwarded = nullptr;
  guard::Outcomes* outcomes = nullptr;  // where requests are counted
  // The header that inference asks for, and its value; empty where it asks for none.
  std::string restricted_header;
  std::string restricted_value;
  size_t max_message_bytes = 0;
  ConnectionLimits limits;
  // Counts memory of messages against the limit of all in flight; false where it would be above it.
  bool (*reserve)(uint64_t bytes) = nullptr;
  void (*release)(uint64_t bytes) = nullptr;
  void (*on_call)() = nullptr;  // of every call; null in tests
  // Whether this server, of two at one port, takes new connections; and whether it has left them to the other one, which
  // is to get new calls as well.
  bool (*accepts)() = nullptr;
  bool (*has_left)() = nullptr;
};

class Call;

// While a thread gives several responses to streams one after the other, they are written to the socket together.
class WrittenTogether {
 public:
  static void Begin();
  static void End();
  // Whether `End` flushes the connection, which has something to send.
  static bool Keep(const std::shared_ptr<ClientConnection>& connection);
};

// One request of a call: where its responses go, and how it is cancelled.
class Slot : public Responses, public std::enable_shared_from_this<Slot> {
 public:
  // `memory` is held to its end. `outcome` is null where nothing is counted.
  Slot(std::shared_ptr<Call> call, bool is_ordered, Held memory, std::shared_ptr<guard::RequestOutcome> outcome)
      : call_(std::move(call)), memory_(std::move(memory)), is_ordered_(is_ordered), outcome_(std::move(outcome)) {}

  void OnMessage(Message message) override;
  void OnEnd(Status status) override;
  const std::shared_ptr<guard::RequestOutcome>& outcome() const { return outcome_; }

 private:
  friend class Call;

  const std::shared_ptr<Call> call_;
  Held memory_;
  // All below is for who has the lock of the connection.
  const bool is_ordered_;  // its responses wait for those of the requests before it
  const std::shared_ptr<guard::RequestOutcome> outcome_;
  bool blocks_ = false;  // the next request of the stream is begun when this one has ended
  bool is_ended_ = false;
  std::deque<Message> held_;
  std::shared_ptr<Running> running_;
};

// One stream of HTTP/2. All of it is for who has the lock of the connection, but what says otherwise.
class Call : public Http2Stream, public std::enable_shared_from_this<Call> {
 public:
  Call(Service* service, std::shared_ptr<ClientConnection> connection, int32_t stream);
  ~Call() override;

  void OnField(std::string_view name, std::string_view value) override;
  void OnHeadersEnd(bool is_end) override;
  void OnData(const char* data, size_t size) override;
  void OnEndOfStream() override;
  // The stream is gone: whatever runs is cancelled.
  void OnClosed() override;
  void OnDeadline();

  // Without the lock: does what has to be done there, such as to hand requests to Triton.
  void RunDeferred();

  // What Triton's own front end answers to a call that was left to it; whole messages with their prefixes.
  void OnForwardedHeaders(Fields fields);
  void OnForwardedData(std::string_view data);
  void OnForwardedEnd(Fields trailers);

 private:
  friend class Slot;
  enum class Kind { kUnknown, kInfer, kStreamInfer, kForwarded };

  struct Pending {
    Chunk message;
    Held memory;
    bool is_compressed = false;
  };

  void Route();
  void OnWholeData(const char* data, size_t size);
  void OnWholeMessage();
  void Defer();
  void Start(Pending pending);
  void MarkWhole();
  std::string_view WholeModel() const;
  void Forward(const Chunk& message, const std::shared_ptr<Slot>& slot);
  void Submit(const Fields& fields, bool has_body);
  void SendHeaders();
  void SendMessage(Message message);
  void Resume();
  void ReleaseOrdered();
  void EndIfDone();
  void Count(std::string_view model, guard::Outcome outcome);
  void Refuse(const Status& status);
  void Finish(const Status& status);
  void FinishWithHttp(const char* status);
  void End(Fields trailers);
  void CancelAll(guard::Outcome outcome);
  void ForgetTimer();

  Service* const service_;
  const std::shared_ptr<ClientConnection> connection_;
  const int32_t stream_;

  Kind kind_ = Kind::kUnknown;
  std::string method_;
  std::string path_;
  std::string content_type_;
  std::string encoding_;
  std::string timeout_;
  std::string restricted_;  // the value of the header that inference asks for
  Fields metadata_;         // for Triton's own front end
  size_t fields_size_ = 0;
  bool has_memory_ = true;  // for the fields
  Loop::Timer timer_{};
  bool has_timer_ = false;

  MessageReader reader_;
  Held kept_;                // for this call and its fields
  Held reading_;             // for what the reader holds, or for the whole body
  std::string whole_body_;  // of a call that is left to Triton, with prefixes
  std::deque<Pending> pending_;  // to be handed to Triton
  bool is_half_closed_ = false;
  bool has_message_ = false;
  bool is_forwarded_ = false;
  std::shared_ptr<Running> forwarded_;  // a call that went on as it came
  std::shared_ptr<guard::RequestOutcome> forwarded_outcome_;
  bool is_starting_ = false;  // a request is neither pending nor among the slots
  bool is_blocked_ = false;   // until a request has ended

  std::unordered_map<Slot*, std::shared_ptr<Slot>> slots_;  // requests that have not ended
  std::deque<std::shared_ptr<Slot>> ordered_;
  std::vector<std::shared_ptr<Running>> to_cancel_;

  uint64_t unread_ = 0;  // bytes of the body that are counted in the memory in flight
  bool sent_headers_ = false;
  bool is_ended_ = false;  // everything that will be sent is in the body
  bool is_gone_ = false;   // the stream is closed
};

class ClientConnection : public Http2Connection {
 public:
  ClientConnection(Service* service, Loop* loop, int fd, const TlsContext* tls)
      : Http2Connection(loop, fd, tls), service_(service), memory_(service->reserve, service->release) {}

  bool Begin();
  // Has the client open another connection for its next calls; those under way are answered.
  void SayGoodbye();

 protected:
  void OnHeadersBegin(int32_t stream) override;
  void AfterRead() override;
  void OnClosed() override;

 private:
  friend class Call;
  friend class Slot;
  void SayGoodbyeAfter(int32_t last_stream);
  // For the thread of the loop alone.
  using OwnTimer = std::optional<Loop::Timer>;
  void After(std::chrono::milliseconds time, OwnTimer ClientConnection::*timer, void (ClientConnection::*task)());
  void ListenFor(std::chrono::milliseconds time);
  void OnSilence();
  void OnNoAnswer();
  void OnAge();
  std::shared_ptr<ClientConnection> self() { return std::static_pointer_cast<ClientConnection>(shared_from_this()); }

  Service* const service_;
  Memory memory_;
  // Calls that have something to do without the lock, in the thread of the loop.
  std::vector<std::shared_ptr<Call>> deferred_;
  bool said_goodbye_ = false;
  OwnTimer silence_timer_;
  OwnTimer age_timer_;
  Clock::time_point asked_{};  // whether the client is there
};

}  // namespace pytriton::grpc
