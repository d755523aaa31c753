#include "call.h"

#include <algorithm>
#include <utility>

#include "../guard/workarounds/trace_flag.h"
#include "forwarded.h"
#include "inner.h"

namespace pytriton::grpc {

namespace {

constexpr std::string_view kInferPath = "/inference.GRPCInferenceService/ModelInfer";
constexpr std::string_view kStreamInferPath = "/inference.GRPCInferenceService/ModelStreamInfer";
constexpr std::string_view kContentType = "application/grpc";
constexpr std::string_view kIdentity = "identity";
constexpr std::string_view kBinary = "-bin";  // the end of the names of headers whose values are base64
constexpr std::string_view kEncodings = "identity, deflate, gzip";
// The most bytes of header fields in a call, the same as in gRPC's own servers.
constexpr size_t kMostFieldsSize = 16 * 1024;
// The memory that a call takes with usual header fields.
constexpr uint64_t kOfCall = 2048;
// The most bytes that are written together; a larger response gains nothing by waiting for another one.
constexpr size_t kMostTogether = 64 * 1024;
constexpr int32_t kStreamWindow = 4 << 20;
constexpr int32_t kConnectionWindow = 64 << 20;
constexpr uint32_t kMostStreams = 16 * 1024;
constexpr uint32_t kMostFrame = 1 << 20;

// The answer of Triton's own front end to a whole call, which is passed on as it comes.
class WholeAnswer : public Answer {
 public:
  explicit WholeAnswer(std::shared_ptr<Call> call) : call_(std::move(call)) {}
  void OnHeaders(Fields fields) override { call_->OnForwardedHeaders(std::move(fields)); }
  void OnData(std::string_view data) override { call_->OnForwardedData(data); }
  void OnEnd(Fields trailers) override { call_->OnForwardedEnd(std::move(trailers)); }

 private:
  const std::shared_ptr<Call> call_;
};

// The answer of Triton's own front end to one request of a stream, which went there as a stream of its own.
class SlotAnswer : public Answer {
 public:
  SlotAnswer(std::shared_ptr<Slot> slot, size_t limit) : slot_(std::move(slot)), reader_(limit) {}
  void OnHeaders(Fields) override {}
  void OnData(std::string_view data) override {
    while (!data.empty() && failure_.code == Code::kOk) {
      size_t used = 0;
      const auto result = reader_.Feed(data.data(), data.size(), &used, nullptr);
      data.remove_prefix(used);
      if (result == MessageReader::Result::kNeedsMore) continue;
      if (result != MessageReader::Result::kMessage) {
        failure_ = {Code::kResourceExhausted, "A response of the model is too large."};
        continue;
      }
      bool is_compressed = false;
      Message message;
      message.push_back(reader_.Take(&is_compressed));
      slot_->OnMessage(std::move(message));
    }
  }
  void OnEnd(Fields trailers) override {
    const bool has_failed = failure_.code != Code::kOk;
    for (const auto& [name, value] : trailers) {
      if (has_failed) break;
      if (name == "grpc-status") failure_.code = static_cast<Code>(std::atoi(value.c_str()));
      if (name == "grpc-message") failure_.text = PercentDecode(value);
    }
    // If the error was a message of the stream, Triton has reported the outcome, unless its front end has refused the
    // request.
    const auto& outcome = slot_->outcome();
    if (failure_.code == Code::kOk && outcome != nullptr && !outcome->is_concluded()) {
      failure_.outcome = guard::Outcome::kInvalid;
    }
    slot_->OnEnd(failure_);
  }

 private:
  const std::shared_ptr<Slot> slot_;
  MessageReader reader_;
  Status failure_;
};

bool IsForTransport(std::string_view name) {
  return name.empty() || name[0] == ':' || name == "te" || name == "content-type" || name == "grpc-timeout" ||
         name == "connection" || name == "host" || name == "content-length";
}

size_t SizeOf(const Message& message) {
  size_t size = 0;
  for (const Chunk& chunk : message) size += chunk.size;
  return size;
}

Fields Trailers(const Status& status) {
  Fields trailers = {{"grpc-status", std::to_string(static_cast<int>(status.code))}};
  if (!status.text.empty()) trailers.emplace_back("grpc-message", PercentEncode(status.text));
  return trailers;
}

bool BeginsWith(std::string_view text, std::string_view begin) { return text.substr(0, begin.size()) == begin; }

// Whether Triton's own front end uses a header field of a caller. Other fields are not passed on, because they cost
// memory; nor are those that gRPC may be unable to read, because it logs them and ends their calls.
bool IsForTriton(std::string_view name, std::string_view value, bool is_any) {
  if (name == "grpc-encoding") return value == kIdentity || value == "gzip" || value == "deflate";
  if (BeginsWith(name, "grpc-")) return name == "grpc-accept-encoding";
  if (name.size() > kBinary.size() && name.substr(name.size() - kBinary.size()) == kBinary) return false;
  return BeginsWith(name, kRestrictedHeader) || name == "triton_grpc_error" || name == guard::kTraceHeader ||
         name == "tracestate" || (is_any && !IsForTransport(name));
}

}  // namespace

// --- several responses ---------------------------------------------------------------------------------------------------

namespace {

struct Together {
  bool is_begun = false;
  std::vector<std::shared_ptr<ClientConnection>> connections;
};
thread_local Together t_together;

}  // namespace

void WrittenTogether::Begin() { t_together.is_begun = true; }

bool WrittenTogether::Keep(const std::shared_ptr<ClientConnection>& connection) {
  if (!t_together.is_begun) return false;
  auto& kept = t_together.connections;
  if (std::find(kept.begin(), kept.end(), connection) == kept.end()) kept.push_back(connection);
  return true;
}

void WrittenTogether::End() {
  t_together.is_begun = false;
  // The connection may be destroyed with its last owner, so it is kept until the end of this function.
  const auto kept = std::exchange(t_together.connections, {});
  for (const auto& connection : kept) connection->Flush();
}

// --- one request -----------------------------------------------------------------------------------------------------

void Slot::OnMessage(Message message) {
  auto lock = call_->connection_->Lock();
  if (call_->is_ended_ || call_->is_gone_) return;
  if (is_ordered_ && call_->ordered_.front().get() != this) {
    call_->waiting_ += SizeOf(message);
    held_.push_back(std::move(message));
    if (!call_->HoldUnread()) call_->connection_->Flush(&lock);
    return;
  }
  call_->SendMessage(std::move(message));
  guard::GivenResponse::Note(call_->body_.backlog);
  // The message of a request that was passed on has left Triton's own front end, so one message less waits there.
  if (outcome_ != nullptr && outcome_->backlog != nullptr) outcome_->backlog->Pass(1);
  // The only message of ModelInfer is sent together with its status.
  if (call_->kind_ != Call::Kind::kStreamInfer) return;
  const bool is_kept = call_->body_.size < kMostTogether && WrittenTogether::Keep(call_->connection_);
  if (!is_kept) call_->connection_->Flush(&lock);
  if (!call_->HoldUnread()) call_->connection_->Flush(&lock);
}

void Slot::OnEnd(Status status) {
  const auto keep = shared_from_this();
  std::shared_ptr<Running> running;  // destroyed after the lock is released, because that may take other locks
  auto lock = call_->connection_->Lock();
  is_ended_ = true;
  if (outcome_ != nullptr) outcome_->CountNotedOr(OutcomeOf(status));
  running = std::move(running_);
  call_->slots_.erase(this);
  if (blocks_) {
    call_->is_blocked_ = false;
    call_->Defer();
  }
  if (call_->kind_ == Call::Kind::kInfer || status.code != Code::kOk) {
    call_->Finish(status);
  } else {
    call_->ReleaseOrdered();
    call_->EndIfDone();
  }
  call_->connection_->Flush(&lock);
  if (!call_->HoldUnread()) call_->connection_->Flush(&lock);
}

// --- a call ----------------------------------------------------------------------------------------------------------

Call::Call(Service* service, std::shared_ptr<ClientConnection> connection, int32_t stream)
    : service_(service),
      connection_(std::move(connection)),
      stream_(stream),
      reader_(service->max_message_bytes),
      kept_(&connection_->memory_),
      reading_(&connection_->memory_),
      unread_(&connection_->unread_memory_) {
  has_memory_ = kept_.Grow(kOfCall);
}

void Call::OnField(std::string_view name, std::string_view value) {
  if (kind_ != Kind::kUnknown) return;  // trailers of a client are ignored
  if (name == ":path") is_inference_ = value == kInferPath || value == kStreamInferPath;
  fields_size_ += name.size() + value.size() + kFieldOverhead;
  if (fields_size_ > kMostFieldsSize) return;
  has_memory_ = has_memory_ && (fields_size_ <= kOfCall / 2 || kept_.Grow(kOfCall + fields_size_));
  if (!has_memory_) return;
  if (name == ":method") method_ = value;
  if (name == ":path") path_ = value;
  if (name == "content-type") content_type_ = value;
  if (name == "grpc-encoding") encoding_ = value;
  if (name == "grpc-timeout") timeout_ = value;
  if (!service_->restricted_header.empty() && name == service_->restricted_header) restricted_ = value;
  if (service_->makes_spans && name == guard::kTraceHeader && guard::IsUnsampled(value)) return;
  if (IsForTriton(name, value, service_->forwards_headers)) metadata_.emplace_back(name, value);
}

void Call::OnHeadersEnd(bool is_end) {
  if (kind_ == Kind::kUnknown && !is_ended_) Route();
  if (is_end) OnEndOfStream();
}

void Call::Route() {
  if (service_->on_call != nullptr) service_->on_call();
  if (fields_size_ > kMostFieldsSize) {
    return Refuse({Code::kResourceExhausted, "The header fields of the call have " + std::to_string(fields_size_) +
                                                 " bytes, as HTTP/2 counts them, and a server of gRPC takes " +
                                                 std::to_string(kMostFieldsSize) + "."});
  }
  if (!has_memory_) return Refuse(NoneLeft());
  if (method_ != "POST") return FinishWithHttp("405");
  if (content_type_.compare(0, kContentType.size(), kContentType) != 0) return FinishWithHttp("415");
  if (const auto timeout = ParseTimeout(timeout_)) {
    timer_ = connection_->loop()->At(Clock::now() + *timeout, [weak = weak_from_this()] {
      if (const auto call = weak.lock()) call->OnDeadline();
    });
    has_timer_ = true;
  }
  if (path_ == kInferPath) {
    kind_ = service_->forwards_all ? Kind::kForwarded : Kind::kInfer;
  } else if (path_ == kStreamInferPath) {
    kind_ = Kind::kStreamInfer;
    body_.backlog = std::make_shared<guard::StreamBacklog>();
  } else {
    kind_ = Kind::kForwarded;
    return;
  }
  if (service_->server.load() == nullptr) {
    Refuse({Code::kUnavailable, "The server does not serve: it has not started yet, or is about to end."});
  } else if (!service_->restricted_header.empty() && restricted_ != service_->restricted_value) {
    Refuse({Code::kUnavailable, "This protocol is restricted, expecting header '" + service_->restricted_header + "'",
            guard::Outcome::kInvalid});
  }
}

// Takes more of a body that is passed on to Triton as it is.
void Call::OnWholeData(const char* data, size_t size) {
  if (whole_body_.size() + size > service_->max_message_bytes) {
    return Refuse({Code::kResourceExhausted, "A message has more than " + std::to_string(service_->max_message_bytes) +
                                                 " bytes, the limit max_request_bytes of the guard."});
  }
  if (!reading_.Grow(whole_body_.size() + size)) return Refuse(NoneLeft());
  whole_body_.append(data, size);
}

void Call::OnData(const char* data, size_t size) {
  if (is_ended_) return;
  if (kind_ == Kind::kForwarded) return OnWholeData(data, size);
  while (size > 0 && !is_ended_) {
    size_t used = 0;
    const auto result = reader_.Feed(data, size, &used, &reading_);
    data += used;
    size -= used;
    switch (result) {
      case MessageReader::Result::kNeedsMore:
        break;
      case MessageReader::Result::kNoneLeft:
        Refuse(NoneLeft());
        break;
      case MessageReader::Result::kTooLarge:
        Refuse({Code::kResourceExhausted, "A message of " + std::to_string(reader_.announced()) + " bytes was announced, "
                                          "more than " + std::to_string(service_->max_message_bytes) +
                                              ", the limit max_request_bytes of the guard."});
        break;
      case MessageReader::Result::kNoMemory:
        Refuse({Code::kResourceExhausted,
                "The server has no memory for a message of " + std::to_string(reader_.announced()) + " bytes.",
                guard::Outcome::kUnavailable});
        break;
      case MessageReader::Result::kMessage:
        OnWholeMessage();
        break;
    }
  }
}

void Call::OnWholeMessage() {
  bool is_compressed = false;
  Chunk message = reader_.Take(&is_compressed);
  Held memory = std::move(reading_);
  if (kind_ == Kind::kInfer && has_message_) return;
  has_message_ = true;
  pending_.push_back({std::move(message), std::move(memory), is_compressed});
  Defer();
}

void Call::OnEndOfStream() {
  is_half_closed_ = true;
  if (is_ended_) return;
  if (reader_.is_inside()) {
    return Refuse({Code::kInternal, "The stream ended within a message.", guard::Outcome::kInvalid});
  }
  if (kind_ == Kind::kInfer && !has_message_) {
    return Refuse({Code::kInternal, "The call has no message.", guard::Outcome::kInvalid});
  }
  if (kind_ == Kind::kForwarded) {
    if (path_ == kInferPath) {
      forwarded_outcome_ = guard::BeginRequest(service_->outcomes, guard::Protocol::kGrpc, WholeModel());
    }
    return Defer();
  }
  EndIfDone();
}

// Returns the model of a call that is passed on to Triton as a whole; "" if it cannot be read.
std::string_view Call::WholeModel() const {
  if (whole_body_.size() < kPrefixSize || whole_body_[0] != 0) return "";
  return ModelOf(whole_body_.data() + kPrefixSize, whole_body_.size() - kPrefixSize);
}

void Call::OnClosed() {
  is_gone_ = true;
  ForgetTimer();
  CancelAll(guard::Outcome::kCancelled);
  body_.Clear();
  unread_.Shrink(0);
  if (body_.backlog != nullptr) body_.backlog->End();
}

void Call::ForgetTimer() {
  if (std::exchange(has_timer_, false)) connection_->loop()->Forget(timer_);
}

void Call::OnDeadline() {
  {
    auto lock = connection_->Lock();
    // The call may have ended and forgotten its deadline after this task had begun.
    if (!std::exchange(has_timer_, false) || is_ended_ || is_gone_) return;
    Finish({Code::kDeadlineExceeded, "Deadline Exceeded"});
    connection_->Flush(&lock);
  }
  connection_->AfterRead();
}

void Call::Defer() {
  connection_->deferred_.push_back(shared_from_this());
  if (connection_->loop()->is_this_thread()) return;
  connection_->loop()->Post([connection = connection_] { connection->AfterRead(); });
}

// Cancels all requests in Triton. For the caller they have ended with `outcome`.
void Call::CancelAll(guard::Outcome outcome) {
  for (const Pending& pending : pending_) {
    Count(pending.is_compressed ? "" : ModelOf(pending.message.data.get(), pending.message.size), outcome);
  }
  pending_.clear();
  for (const auto& slot : ordered_) slot->held_.clear();
  waiting_ = 0;
  // Each of these refers to this call.
  ordered_.clear();
  if (forwarded_outcome_ != nullptr) forwarded_outcome_->Count(outcome);
  for (const auto& [slot, shared] : slots_) {
    if (slot->outcome_ != nullptr) slot->outcome_->Count(outcome);
    if (shared->running_ != nullptr) to_cancel_.push_back(shared->running_);
  }
  if (forwarded_ != nullptr) to_cancel_.push_back(std::move(forwarded_));
  if (!to_cancel_.empty()) Defer();
}

// Hands requests to Triton one after the other, in the thread of the loop alone, so that they keep their order.
void Call::RunDeferred() {
  for (;;) {
    std::vector<std::shared_ptr<Running>> to_cancel;
    std::optional<Pending> pending;
    bool forwards_whole = false;
    {
      const auto lock = connection_->Lock();
      to_cancel.swap(to_cancel_);
      if (to_cancel.empty()) {
        if (is_ended_ || is_gone_ || is_blocked_) return;
        forwards_whole = kind_ == Kind::kForwarded;
        if (forwards_whole) {
          if (!is_half_closed_ || std::exchange(is_forwarded_, true)) return;
        } else {
          if (pending_.empty()) return;
          pending = std::move(pending_.front());
          pending_.pop_front();
          is_starting_ = true;
        }
      }
    }
    for (const auto& running : to_cancel) running->Cancel();
    if (!to_cancel.empty()) continue;
    if (forwards_whole) {
      MarkWhole();
      service_->inner->Call({path_, metadata_, std::move(whole_body_)}, std::make_shared<WholeAnswer>(shared_from_this()));
      return;
    }
    Start(std::move(*pending));
  }
}

void Call::Start(Pending pending) {
  Status status;
  if (pending.is_compressed) status = Decompress(encoding_, service_->max_message_bytes, &pending.message, &pending.memory);
  Request request;
  if (status.code == Code::kOk) status = Read(pending.message.data.get(), pending.message.size, &request);
  const std::shared_lock<std::shared_mutex> server_lock(service_->server_mutex);
  TRITONSERVER_Server* const server = service_->server.load();
  if (status.code == Code::kOk && server == nullptr) status = {Code::kUnavailable, "The server is about to end."};
  if (status.code != Code::kOk) {
    auto lock = connection_->Lock();
    Count(request.model, OutcomeOf(status));
    Finish(status);
    return connection_->Flush(&lock);
  }
  const bool is_stream = kind_ == Kind::kStreamInfer;
  const bool is_forwarded = service_->forwards_all || request.is_for_triton;
  const bool is_ordered = is_stream && !IsDecoupled(server, request);
  const auto outcome = guard::BeginRequest(service_->outcomes, guard::Protocol::kGrpc, request.model);
  const auto slot = std::make_shared<Slot>(shared_from_this(), is_ordered, std::move(pending.memory), outcome);
  {
    const auto lock = connection_->Lock();
    is_starting_ = false;
    if (is_ended_ || is_gone_) {
      if (outcome != nullptr) outcome->Count(guard::Outcome::kCancelled);
      return;
    }
    slots_[slot.get()] = slot;
    if (is_ordered) ordered_.push_back(slot);
    slot->blocks_ = is_blocked_ = is_forwarded && is_stream && request.is_in_sequence;
  }
  if (is_forwarded) return Forward(pending.message, slot);
  auto running = grpc::Start(server, is_stream ? Method::kStreamInfer : Method::kInfer, std::move(request),
                             std::move(pending.message), slot);
  bool is_unwanted = false;
  {
    const auto lock = connection_->Lock();
    if (!slot->is_ended_) slot->running_ = running;
    is_unwanted = is_ended_ || is_gone_;
  }
  if (is_unwanted && running != nullptr) running->Cancel();
}

// Marks a call of inference that is passed on as it is, so that it can be cancelled when its caller cancels. A
// compressed one cannot be marked.
void Call::MarkWhole() {
  if (path_ != kInferPath) return;
  const bool can_be_read = whole_body_.size() >= kPrefixSize && whole_body_[0] == 0;
  auto running = can_be_read ? service_->forwarded->Mark(&whole_body_, forwarded_outcome_) : nullptr;
  if (running == nullptr) return;
  const auto lock = connection_->Lock();
  if (is_ended_ || is_gone_) {
    to_cancel_.push_back(std::move(running));
  } else {
    forwarded_ = std::move(running);
  }
}

// Passes one request on to Triton's own front end, as a call with nothing else in it.
void Call::Forward(const Chunk& message, const std::shared_ptr<Slot>& slot) {
  if (!slot->memory_.Grow(slot->memory_.bytes() + message.size)) return slot->OnEnd(NoneLeft());
  ForwardedCall call{path_, {}, std::string(kPrefixSize, '\0')};
  WritePrefix(call.body.data(), message.size);
  call.body.append(message.data.get(), message.size);
  if (slot->outcome_ != nullptr) slot->outcome_->backlog = body_.backlog;
  auto running = service_->forwarded->Mark(&call.body, slot->outcome_);
  bool is_unwanted = false;
  {
    const auto lock = connection_->Lock();
    is_unwanted = is_ended_ || is_gone_;
    slot->running_ = running;
  }
  for (const auto& [name, value] : metadata_) {
    if (name != "grpc-encoding" && name != "grpc-accept-encoding") call.metadata.emplace_back(name, value);
  }
  service_->inner->Call(std::move(call), std::make_shared<SlotAnswer>(slot, service_->max_message_bytes));
  if (is_unwanted) running->Cancel();
}

// --- what is sent ----------------------------------------------------------------------------------------------------

void Call::Submit(const Fields& fields, bool has_body) {
  sent_headers_ = true;
  const auto values = ClientConnection::NameValues(fields);
  const auto provider = ClientConnection::Provider();
  connection_->api_->submit_response(connection_->session_, stream_, values.data(), values.size(),
                                     has_body ? &provider : nullptr);
}

void Call::SendHeaders() {
  if (sent_headers_) return;
  Submit({{":status", "200"}, {"content-type", std::string(kContentType)}, {"grpc-accept-encoding", std::string(kEncodings)}},
         true);
}

void Call::SendMessage(Message message) {
  const size_t size = SizeOf(message);
  if (size > INT32_MAX) {
    return Finish({Code::kResourceExhausted, "A response of " + std::to_string(size) + " bytes is more than gRPC takes.",
                   guard::Outcome::kFailed});
  }
  char prefix[kPrefixSize];
  WritePrefix(prefix, size);
  body_.Add(std::string_view(prefix, kPrefixSize));
  for (Chunk& chunk : message) body_.Add(std::move(chunk));
  if (kind_ == Kind::kStreamInfer) {
    body_.Note();
    SendHeaders();
    Resume();
  }
}

bool Call::HoldUnread() {
  if (is_gone_) return true;
  const uint64_t unread = body_.cost() + waiting_;
  if (unread_.Grow(unread)) {
    unread_.Shrink(unread);
    return true;
  }
  const Status status{Code::kResourceExhausted, "The client reads the answers of the server too slowly: " +
                                                    std::to_string(unread) + " bytes wait for it, and the guard's "
                                                    "max_in_flight_bytes leaves no more memory."};
  body_.Clear();
  unread_.Shrink(0);
  if (is_ended_) {
    // The trailers that were about to be sent belong to a whole answer.
    body_.trailers = Trailers(status);
  } else {
    Finish(status);
  }
  return false;
}

void Call::Resume() { connection_->api_->resume_data(connection_->session_, stream_); }

void Call::ReleaseOrdered() {
  while (!ordered_.empty()) {
    const std::shared_ptr<Slot> front = ordered_.front();
    for (Message& message : front->held_) {
      waiting_ -= SizeOf(message);
      if (!is_ended_ && !is_gone_) SendMessage(std::move(message));
    }
    front->held_.clear();
    // If the message ended the call, nothing is left to send.
    if (!front->is_ended_ || ordered_.empty()) return;
    ordered_.pop_front();
  }
}

void Call::EndIfDone() {
  if (kind_ == Kind::kStreamInfer && is_half_closed_ && !is_starting_ && pending_.empty() && slots_.empty()) Finish({});
}

void Call::Count(std::string_view model, guard::Outcome outcome) {
  if (service_->outcomes != nullptr) service_->outcomes->Count(model, guard::Protocol::kGrpc, outcome);
}

// Ends a call with an error before its model is known.
void Call::Refuse(const Status& status) {
  if (is_ended_ || is_gone_) return;
  if (is_inference_) Count("", OutcomeOf(status));
  Finish(status);
}

void Call::Finish(const Status& status) {
  if (is_ended_ || is_gone_) return;
  if (status.code != Code::kOk) CancelAll(OutcomeOf(status));
  End(Trailers(status));
}

void Call::End(Fields trailers) {
  is_ended_ = true;
  ForgetTimer();
  body_.is_ended = true;
  if (sent_headers_ || body_.size > 0) {
    body_.trailers = std::move(trailers);
    SendHeaders();
    Resume();
    return;
  }
  Fields fields = {{":status", "200"}, {"content-type", std::string(kContentType)}};
  fields.insert(fields.end(), trailers.begin(), trailers.end());
  Submit(fields, false);
}

void Call::FinishWithHttp(const char* status) {
  is_ended_ = true;
  Submit({{":status", status}}, false);
}

void Call::OnForwardedHeaders(Fields fields) {
  const auto lock = connection_->Lock();
  if (!is_ended_ && !is_gone_ && !sent_headers_) Submit(fields, true);
}

void Call::OnForwardedData(std::string_view data) {
  auto lock = connection_->Lock();
  if (is_ended_ || is_gone_) return;
  body_.Add(data);
  Resume();
  connection_->Flush(&lock);
  if (!HoldUnread()) connection_->Flush(&lock);
}

void Call::OnForwardedEnd(Fields trailers) {
  auto lock = connection_->Lock();
  if (is_ended_ || is_gone_) return;
  Fields own;
  Status status;
  for (auto& [name, value] : trailers) {
    if (name == "grpc-status") status.code = static_cast<Code>(std::atoi(value.c_str()));
    if (name == "grpc-message") status.text = value;
    if (!IsForTransport(name)) own.emplace_back(std::move(name), std::move(value));
  }
  if (forwarded_outcome_ != nullptr) forwarded_outcome_->CountNotedOr(OutcomeOf(status));
  End(std::move(own));
  connection_->Flush(&lock);
}

// --- the connection --------------------------------------------------------------------------------------------------

bool ClientConnection::Begin() {
  if (!Http2Connection::Begin(true,
                              {{nghttp2::kSettingsMaxConcurrentStreams, kMostStreams},
                               {nghttp2::kSettingsInitialWindowSize, kStreamWindow},
                               {nghttp2::kSettingsMaxFrameSize, kMostFrame},
                               {nghttp2::kSettingsMaxHeaderListSize, kMostFieldsSize}},
                              kConnectionWindow)) {
    return false;
  }
  loop()->Post([connection = self()] {
    const ConnectionLimits& limits = connection->service_->limits;
    if (limits.keepalive_time.count() > 0) connection->ListenFor(limits.keepalive_time);
    if (limits.max_age.count() > 0) {
      connection->After(limits.max_age, &ClientConnection::age_timer_, &ClientConnection::OnAge);
    }
  });
  return true;
}

// Lets the loop call a function of this connection after a time, if the connection still exists. Called in the thread
// of the loop.
void ClientConnection::After(std::chrono::milliseconds time, OwnTimer ClientConnection::*timer,
                             void (ClientConnection::*task)()) {
  if (is_closed()) return;
  this->*timer = loop()->At(Clock::now() + time, [weak = std::weak_ptr<ClientConnection>(self()), timer, task] {
    const auto connection = weak.lock();
    if (connection == nullptr) return;
    ((*connection).*timer).reset();
    if (!connection->is_closed()) ((*connection).*task)();
  });
}

void ClientConnection::ListenFor(std::chrono::milliseconds time) {
  After(time, &ClientConnection::silence_timer_, &ClientConnection::OnSilence);
}

// Asks a client that has been silent for long whether it is still there.
void ClientConnection::OnSilence() {
  const ConnectionLimits& limits = service_->limits;
  auto lock = Lock();
  const auto silent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - heard());
  if (silent < limits.keepalive_time) return ListenFor(limits.keepalive_time - silent);
  if (streams_.empty() && !limits.keepalive_without_calls) return ListenFor(limits.keepalive_time);
  asked_ = Clock::now();
  api_->submit_ping(session_, 0, nullptr);
  Flush(&lock);
  After(limits.keepalive_timeout, &ClientConnection::silence_timer_, &ClientConnection::OnNoAnswer);
}

void ClientConnection::OnNoAnswer() {
  bool has_answered = false;
  {
    const auto lock = Lock();
    has_answered = heard() > asked_;
  }
  if (has_answered) return ListenFor(service_->limits.keepalive_time);
  Close();
}

void ClientConnection::OnAge() {
  SayGoodbye();
  const auto grace = service_->limits.max_age_grace;
  if (grace.count() > 0) After(grace, &ClientConnection::age_timer_, &ClientConnection::Close);
}

void ClientConnection::SayGoodbye() {
  auto lock = Lock();
  if (is_closed()) return;
  SayGoodbyeAfter(api_->get_last_proc_stream_id(session_));
  Flush(&lock);
}

// Calls after the last stream were not served, and the client repeats them over another connection.
void ClientConnection::SayGoodbyeAfter(int32_t last_stream) {
  if (std::exchange(said_goodbye_, true)) return;
  api_->submit_goaway(session_, 0, last_stream, nghttp2::kNoError, nullptr, 0);
}

void ClientConnection::OnHeadersBegin(int32_t stream) {
  // The goodbye that is about to be sent tells the client that this call was not served, so it is made elsewhere.
  if (said_goodbye_ && streams_.count(stream) == 0) return;
  if (service_->has_left()) return SayGoodbyeAfter(stream - 2);
  if (!service_->accepts()) SayGoodbyeAfter(stream);
  auto& call = streams_[stream];
  if (call == nullptr) call = std::make_shared<Call>(service_, self(), stream);
}

void ClientConnection::AfterRead() {
  for (;;) {
    std::vector<std::shared_ptr<Call>> deferred;
    {
      const auto lock = Lock();
      deferred.swap(deferred_);
    }
    if (deferred.empty()) return;
    for (const auto& call : deferred) call->RunDeferred();
  }
}

void ClientConnection::OnClosed() {
  for (OwnTimer* const timer : {&silence_timer_, &age_timer_}) {
    if (timer->has_value()) loop()->Forget(**timer);
    timer->reset();
  }
  {
    const auto lock = Lock();
    for (const auto& [stream, call] : streams_) call->OnClosed();
    streams_.clear();
  }
  AfterRead();
}

}  // namespace pytriton::grpc
