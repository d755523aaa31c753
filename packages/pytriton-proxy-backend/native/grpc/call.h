// The calls of one client: its connection, and the requests to Triton that its streams carry.
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

// How long a connection may be silent and how old it may get, as in the options of Triton's own front end; zero if an
// option is not set.
struct ConnectionLimits {
  std::chrono::milliseconds keepalive_time{0};
  std::chrono::milliseconds keepalive_timeout{0};
  bool keepalive_without_calls = false;
  std::chrono::milliseconds max_age{0};
  std::chrono::milliseconds max_age_grace{0};
};

// The beginning of the names of headers for Triton's option --grpc-restricted-protocol.
constexpr std::string_view kRestrictedHeader = "triton-grpc-protocol-";

// What all calls share. Made once, before the first connection.
struct Service {
  // The server that gets the requests; null before it is made, and after its end has begun.
  std::atomic<TRITONSERVER_Server*> server{nullptr};
  // All requests are passed on to Triton's own front end, for instance because they are traced. A call of ours that
  // never cancels stands between it and the client.
  std::atomic<bool> forwards_all{false};
  bool forwards_headers = false;  // whether any headers are, for the option --grpc-header-forward-pattern
  bool makes_spans = false;       // whether Triton's own front end makes spans; see ../guard/trace_flag.h
  std::shared_mutex server_mutex;  // held as shared by threads that hand a request to it
  Inner* inner = nullptr;
  ForwardedRequests* forwarded = nullptr;
  guard::Outcomes* outcomes = nullptr;  // where requests are counted
  // The header that the server requires for inference, and its value; "" if it requires none.
  std::string restricted_header;
  std::string restricted_value;
  size_t max_message_bytes = 0;
  ConnectionLimits limits;
  // Counts memory of messages against the limit of all requests in flight; false if the limit would be exceeded.
  bool (*reserve)(uint64_t bytes) = nullptr;
  void (*release)(uint64_t bytes) = nullptr;
  void (*on_call)() = nullptr;  // is called for every call; null in tests
  // While two servers share a port: whether this one takes new connections; and whether it has left them to the other
  // one, which then gets new calls, too.
  bool (*accepts)() = nullptr;
  bool (*has_left)() = nullptr;
};

class Call;

// Between `Begin` and `End`, the responses that a thread gives to several streams are collected, and then written to
// each socket together.
class WrittenTogether {
 public:
  static void Begin();
  static void End();
  // Notes a connection that has something to send, for `End` to flush. Returns whether `End` will.
  static bool Keep(const std::shared_ptr<ClientConnection>& connection);
};

// One request of a call: where its responses go, and how it is cancelled.
class Slot : public Responses, public std::enable_shared_from_this<Slot> {
 public:
  // `memory` is held until its end. `outcome` is null if requests are not counted.
  Slot(std::shared_ptr<Call> call, bool is_ordered, Held memory, std::shared_ptr<guard::RequestOutcome> outcome)
      : call_(std::move(call)), memory_(std::move(memory)), is_ordered_(is_ordered), outcome_(std::move(outcome)) {}

  void OnMessage(Message message) override;
  void OnEnd(Status status) override;
  const std::shared_ptr<guard::RequestOutcome>& outcome() const { return outcome_; }

 private:
  friend class Call;

  const std::shared_ptr<Call> call_;
  Held memory_;
  // The lock of the connection guards everything below.
  const bool is_ordered_;  // its responses wait for those of the requests before it
  const std::shared_ptr<guard::RequestOutcome> outcome_;
  bool blocks_ = false;  // the next request of the stream is begun only when this one has ended
  bool is_ended_ = false;
  std::deque<Message> held_;  // counted in `waiting_` of the call
  std::shared_ptr<Running> running_;
};

// One stream of HTTP/2. Everything needs the lock of the connection, unless it says otherwise.
class Call : public Http2Stream, public std::enable_shared_from_this<Call> {
 public:
  Call(Service* service, std::shared_ptr<ClientConnection> connection, int32_t stream);

  void OnField(std::string_view name, std::string_view value) override;
  void OnHeadersEnd(bool is_end) override;
  void OnData(const char* data, size_t size) override;
  void OnEndOfStream() override;
  // The stream is closed, so all running requests are cancelled.
  void OnClosed() override;
  void OnDeadline();

  // Without the lock: does what must be done without it, such as handing requests to Triton.
  void RunDeferred();

  // The answer of Triton's own front end to a call that was passed on; whole messages with their prefixes.
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
  // Counts the memory of what the client has not read. Returns false if the limit leaves none: the answer has become an
  // error, which the caller has to flush.
  bool HoldUnread();
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
  bool is_inference_ = false;  // by its path, also where there is no memory for the path
  std::string content_type_;
  std::string encoding_;
  std::string timeout_;
  std::string restricted_;  // the value of the header that the server requires for inference
  Fields metadata_;         // header fields for Triton's own front end
  size_t fields_size_ = 0;
  bool has_memory_ = true;  // whether there was memory for the fields
  Loop::Timer timer_{};
  bool has_timer_ = false;

  MessageReader reader_;
  Held kept_;                // the memory of this call and its fields
  Held reading_;             // the memory of what the reader holds, or of the whole body
  std::string whole_body_;  // the body of a call that is passed on, with prefixes
  std::deque<Pending> pending_;  // requests that are to be handed to Triton
  bool is_half_closed_ = false;
  bool has_message_ = false;
  bool is_forwarded_ = false;
  std::shared_ptr<Running> forwarded_;  // the call that was passed on as it is
  std::shared_ptr<guard::RequestOutcome> forwarded_outcome_;
  bool is_starting_ = false;  // a request is being handed to Triton, so it is neither pending nor among the slots
  bool is_blocked_ = false;   // nothing more is begun until a request has ended

  std::unordered_map<Slot*, std::shared_ptr<Slot>> slots_;  // requests that have not ended
  std::deque<std::shared_ptr<Slot>> ordered_;
  std::vector<std::shared_ptr<Running>> to_cancel_;

  Held unread_;           // for what the client has not read
  uint64_t waiting_ = 0;  // bytes of responses that wait for those of an earlier request
  bool sent_headers_ = false;
  bool is_ended_ = false;  // everything that will be sent is in the body
  bool is_gone_ = false;   // the stream is closed
};

class ClientConnection : public Http2Connection {
 public:
  ClientConnection(Service* service, Loop* loop, int fd, const TlsContext* tls)
      : Http2Connection(loop, fd, tls), service_(service) {}

  bool Begin();
  // Asks the client to open another connection for its next calls; calls that are under way are answered.
  void SayGoodbye();

 protected:
  void OnHeadersBegin(int32_t stream) override;
  void AfterRead() override;
  void OnClosed() override;

 private:
  friend class Call;
  friend class Slot;
  void SayGoodbyeAfter(int32_t last_stream);
  // Used by the thread of the loop alone.
  using OwnTimer = std::optional<Loop::Timer>;
  void After(std::chrono::milliseconds time, OwnTimer ClientConnection::*timer, void (ClientConnection::*task)());
  void ListenFor(std::chrono::milliseconds time);
  void OnSilence();
  void OnNoAnswer();
  void OnAge();
  std::shared_ptr<ClientConnection> self() { return std::static_pointer_cast<ClientConnection>(shared_from_this()); }

  Service* const service_;
  Memory memory_{service_->reserve, service_->release, 64 * 1024};
  Memory unread_memory_{service_->reserve, service_->release, 1 << 20};  // of what the client has not read
  // Calls for which the thread of the loop has something to do without the lock.
  std::vector<std::shared_ptr<Call>> deferred_;
  bool said_goodbye_ = false;
  OwnTimer silence_timer_;
  OwnTimer age_timer_;
  Clock::time_point asked_{};  // when the client was asked whether it is there
};

}  // namespace pytriton::grpc
