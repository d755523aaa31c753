#include "caller.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "models.h"

namespace pytriton {

namespace {

constexpr int kTickMs = 1000;
// The most packets that wait for a worker that does not read. Beyond that, answers wait as they do for room in the
// arena.
constexpr size_t kMostPosted = 4096;
// The most loads and unloads of one worker at a time, each of which has a thread.
constexpr int kMaxControls = 64;
// An error with a longer text is sent in a record.
constexpr size_t kMaxFailText = kMaxPacket - sizeof(Message);

bool NeedsRecord(Operation operation) {
  return operation == Operation::kInfer || operation == Operation::kMetric || operation == Operation::kMetricFamily ||
         operation == Operation::kLog || operation == Operation::kLoadModel;
}

}  // namespace

// ---- what Triton's threads bring ---------------------------------------------------------------------------------------

void Caller::Respond(const CallRef& call, Response response, bool final) {
  std::lock_guard<std::mutex> lock(mutex_);
  // A caller that wants one response gets it with the first answer.
  Answer answer{std::move(response), final || !call->stream};
  // The answers of one call keep their order; a small answer does not wait for a large one of another call.
  const auto found = waiting_.find(call->number);
  if (closed_ || call->done || (found == waiting_.end() && TryAnswer(call, answer))) return;
  if (found != waiting_.end()) {
    found->second.answers.push_back(std::move(answer));
    return;
  }
  Waiting& waits = waiting_[call->number];
  waits.call = call;
  waits.since_ns = NowNs();
  waits.answers.push_back(std::move(answer));
  Wake();
}

void Caller::Released(const CallRef& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  call->memory.reset();
  // If the last answer comes soon, it tells the worker that its record is free, so no message is needed for that.
  if (closed_ || !call->holds_block || (!call->done && !call->stream)) return;
  call->holds_block = false;
  Message message = MessageOf(MessageType::kRelease);
  message.segment = call->segment;
  message.offset = call->offset;
  Post(message);
}

// ---- answers ---------------------------------------------------------------------------------------------------------

uint16_t Caller::Flags(const CallRef& call, bool final) {
  if (!final) return 0;
  uint16_t flags = kFlagBatchDone;
  call->done = true;
  if (call->holds_block && call->memory == nullptr) {
    call->holds_block = false;
    flags |= kFlagInputReleased;
  }
  calls_.erase(call->number);
  return flags;
}

void Caller::Finish(const CallRef& call, const Failure& failure, uint64_t value) {
  if (closed_) return;
  // Triton may still hold the request of a stream that has ended, and read its inputs.
  if (!call->HasRequest()) call->memory.reset();
  if (failure) {
    // A long error needs room in the arena. If there is none, its text is cut off, because it must not wait.
    if (!Fail(call, failure, true)) Fail(call, {failure.code, failure.text.substr(0, kMaxFailText)}, true);
    return;
  }
  Message message = MessageOf(MessageType::kResult);
  message.flags = Flags(call, true);
  message.batch = call->number;
  message.length = value;
  Post(message);
}

bool Caller::Fail(const CallRef& call, const Failure& failure, bool final) {
  if (failure.text.size() > kMaxFailText) {
    ResponseSource source;
    source.flags = kResponseError;
    source.error_code = failure.code;
    source.error = failure.text;
    return SendRecord(call, source, final);
  }
  Message message = MessageOf(MessageType::kFail);
  message.flags = Flags(call, final);
  message.batch = call->number;
  message.index = failure.code;
  Post(message, failure.text);
  return true;
}

bool Caller::Allocate(uint64_t length, Block* block, Failure* failure) {
  Arena::Result result = responses_.Allocate(length, block);
  if (result == Arena::Result::kFull && length <= responses_.budget()) {
    // Segments that were made for smaller answers are removed for a larger one.
    for (const uint32_t id : responses_.DropUnused()) {
      Message message = MessageOf(MessageType::kSegmentClose);
      message.segment = id;
      Post(message);
    }
    result = responses_.Allocate(length, block);
  }
  if (result == Arena::Result::kNeedSegment) {
    std::string error;
    Segment* segment = responses_.AddSegment(length, &error);
    if (segment == nullptr) {
      *failure = {TRITONSERVER_ERROR_UNAVAILABLE, "memory for the outputs could not be had: " + error};
      return false;
    }
    Message message = MessageOf(MessageType::kSegment);
    message.segment = segment->id();
    message.length = segment->size();
    Post(message, "", segment->TakeFd());
    result = responses_.Allocate(length, block);
  }
  if (result == Arena::Result::kOk) return true;
  if (length > responses_.budget()) {
    *failure = {TRITONSERVER_ERROR_INVALID_ARG,
                "the outputs take " + std::to_string(length) + " bytes; the arena of this worker may have " +
                    std::to_string(responses_.budget()) + " bytes. Raise arena_budget_bytes of the model that calls"};
  }
  return false;
}

// Returns false if it must wait for room.
bool Caller::SendRecord(const CallRef& call, const ResponseSource& source, bool final) {
  BatchLayout layout;
  Failure failure;
  Block block;
  std::string error;
  if (!LayoutResponse(source, &layout, &error)) return Fail(call, {TRITONSERVER_ERROR_INVALID_ARG, error}, final);
  if (!Allocate(layout.record_length, &block, &failure)) return failure ? Fail(call, failure, final) : false;
  WriteResponse(source, layout, call->number, block.data);
  Message message = MessageOf(MessageType::kResponse);
  message.flags = Flags(call, final);
  message.batch = call->number;
  message.segment = block.segment;
  message.offset = block.offset;
  message.length = layout.record_length;
  Post(message);
  return true;
}

// Returns false if it must wait for room in the arena; the caller of this function then keeps the response.
bool Caller::TryAnswer(const CallRef& call, const Answer& answer) {
  if (outbox_.size() >= kMostPosted) return false;
  if (answer.response == nullptr) {
    // The end of a stream has no outputs; every other answer has some.
    if (call->stream && answer.final) {
      Finish(call, {}, 0);
      return true;
    }
    return Fail(call, {TRITONSERVER_ERROR_INTERNAL, "Unexpected empty response."}, answer.final);
  }
  Failure failure = Take(TRITONSERVER_InferenceResponseError(answer.response.get()));
  ResponseSource source;
  if (!failure) failure = ReadResponse(answer.response.get(), &source);
  return failure ? Fail(call, failure, answer.final) : SendRecord(call, source, answer.final);
}

void Caller::AnswerWaiting() {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    auto& [call, answers, since_ns] = it->second;
    while (!answers.empty() && TryAnswer(call, answers.front())) {
      answers.pop_front();
      since_ns = NowNs();
    }
    if (!answers.empty() && NowNs() - since_ns < kArenaTimeoutNs) {
      ++it;
      continue;
    }
    if (!answers.empty()) GiveUp(call);
    it = waiting_.erase(it);
  }
}

void Caller::GiveUp(const CallRef& call) {
  const std::string waited = "for " + std::to_string(kArenaTimeoutNs / kMillisecond) + " ms ";
  Fail(call,
       Failure{
           TRITONSERVER_ERROR_UNAVAILABLE,
           outbox_.size() >= kMostPosted
               ? waited + "this worker has read none of the answers to its calls, of which " +
                     std::to_string(outbox_.size()) + " wait"
               : waited + "the arena of this worker, " + std::to_string(responses_.budget()) +
                     " bytes, had no room for the outputs: " + std::to_string(responses_.in_use()) +
                     " are in use by outputs that are kept. Raise arena_budget_bytes of the model that calls"},
       true);
  call->Cancel();
}

void Caller::Post(Message message, std::string body, int fd) {
  outbox_.push_back({message, std::move(body), fd});
  if (outbox_.size() == 1) Flush();
}

void Caller::Flush() {
  std::string error;
  while (!outbox_.empty()) {
    auto& next = outbox_.front();
    const Sent sent = SendPacket(fd_, &next.message, next.body.data(), next.body.size(), next.fd, &error);
    if (sent == Sent::kNoRoom) {
      if (!std::exchange(is_blocked_, true)) Wake();
      return;
    }
    // If this failed because the socket was closed, the reading thread will notice.
    is_blocked_ = false;
    if (next.fd >= 0) close(next.fd);
    outbox_.pop_front();
  }
}

void Caller::Wake() {
  const uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof(one)) < 0 && errno != EAGAIN) PYTRITON_LOG(ERROR, Errno("waking a thread"));
}

// ---- what the worker wants -------------------------------------------------------------------------------------------

CallRef Caller::BeginCall(const Message& message, std::string* error) {
  auto call = std::make_shared<Call>(shared_from_this(), message, (message.flags & kFlagStream) != 0);
  std::lock_guard<std::mutex> lock(mutex_);
  if (message.length != 0) {
    call->memory = requests_.Find(message.segment, message.offset, message.length, error);
    if (!call->memory) {
      *error = "the record of its call lies " + *error;
      return nullptr;
    }
  }
  if (!calls_.emplace(message.batch, call).second) {
    *error = "it made call " + std::to_string(message.batch) + ", which is still under way";
    return nullptr;
  }
  return call;
}

Failure Caller::ReadRecord(const CallRef& call, const Message& message, Incoming* in) {
  if (!NeedsRecord(in->operation)) return {};
  std::string malformed;
  const std::shared_ptr<Segment> memory = call->memory;
  if (!memory) return {TRITONSERVER_ERROR_INVALID_ARG, "the call came without its record"};
  if (in->record->Parse(memory->data() + message.offset, message.length, message.batch, &malformed)) return {};
  return {TRITONSERVER_ERROR_INVALID_ARG, "the record of the call is malformed: " + malformed};
}

// A load takes as long as the model needs, and an unload may end the very model that calls. So nobody waits for this
// thread, and it owns all that it uses but two: the server, which waits for it, and this library, which is never
// unloaded.
Caller::Outcome Caller::StartControl(const CallRef& call, const Incoming& in) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (controls_ >= kMaxControls) {
    return {{TRITONSERVER_ERROR_UNAVAILABLE,
             "the worker loads or unloads " + std::to_string(kMaxControls) + " models already"}};
  }
  std::thread([self = shared_from_this(), call, in] {
    Failure result{TRITONSERVER_ERROR_UNAVAILABLE, "no memory is left for it"};
    Guarded("loading or unloading a model", [&] {
      result = in.operation == Operation::kLoadModel ? LoadModel(*self->context_, in.name, *in.record)
                                                     : UnloadModel(*self->context_, in.name, in.body.subject != 0);
    });
    std::lock_guard<std::mutex> done(self->mutex_);
    --self->controls_;
    self->Finish(call, result, 0);
  }).detach();
  ++controls_;
  return {{}, 0, true};
}

Caller::Outcome Caller::Do(const CallRef& call, const Incoming& in) {
  Outcome outcome;
  switch (in.operation) {
    case Operation::kInfer:
      outcome.failure = Infer(*context_, call, in.body, in.name, *in.record);
      outcome.is_later = !outcome.failure;
      return outcome;
    case Operation::kLoadModel:
    case Operation::kUnloadModel:
      return StartControl(call, in);
    case Operation::kModelReady: {
      bool is_ready = false;
      outcome.failure =
          Take(TRITONSERVER_ServerModelIsReady(context_->server, in.name.c_str(), in.body.subject, &is_ready));
      outcome.value = is_ready;
      return outcome;
    }
    case Operation::kReadiness:
      context_->readiness->Wait(
          this, [call](uint64_t question) { call->caller->Ask(call, question); },
          static_cast<uint64_t>(in.body.subject), {in.body.value != 0, in.name});
      outcome.is_later = true;
      return outcome;
    case Operation::kLog:
      outcome.failure = WriteLog(in.body, in.name, *in.record);
      return outcome;
    default:
      break;
  }
  if (in.operation >= Operation::kMetricFamily && in.operation <= Operation::kMetricFamilyDelete) {
    outcome.failure = metrics_.Do(in.operation, in.body, in.name, *in.record, &outcome.value);
  } else {
    outcome.failure = {TRITONSERVER_ERROR_UNSUPPORTED, "this proxy backend knows no operation " +
                                                           std::to_string(static_cast<uint32_t>(in.operation)) +
                                                           ": it is older than the worker"};
  }
  return outcome;
}

bool Caller::HandleCall(const Packet& packet, std::string* error) {
  const Message& message = packet.message;
  Incoming in{};
  if (packet.body_length < sizeof(in.body)) {
    *error = "it sent a call of " + std::to_string(packet.body_length) + " bytes, it has at least " +
             std::to_string(sizeof(in.body));
    return false;
  }
  in.operation = static_cast<Operation>(message.index);
  std::memcpy(&in.body, packet.body, sizeof(in.body));
  in.name.assign(
      reinterpret_cast<const char*>(packet.body) + sizeof(in.body), packet.body_length - sizeof(in.body));
  const CallRef call = BeginCall(message, error);
  if (!call) return false;
  Outcome outcome;
  outcome.failure = ReadRecord(call, message, &in);
  if (!outcome.failure) outcome = Do(call, in);
  if (outcome.is_later) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  Finish(call, outcome.failure, outcome.value);
  return true;
}

// A call that is done already cannot be cancelled.
void Caller::HandleCancel(const Message& message) {
  CallRef call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = calls_.find(message.batch);
    if (found != calls_.end()) call = found->second;
  }
  if (call) call->Cancel();
}

bool Caller::HandleRelease(const Message& message, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (responses_.Release(message.segment, message.offset)) {
    AnswerWaiting();
    return true;
  }
  *error = "it released the block at " + std::to_string(message.offset) + " of segment " +
           std::to_string(message.segment) + ", which is not in use";
  return false;
}

bool Caller::Handle(const Packet& packet, std::string* error) {
  const Message& message = packet.message;
  switch (static_cast<MessageType>(message.type)) {
    case MessageType::kCall:
      return HandleCall(packet, error);
    case MessageType::kCancel:
      HandleCancel(message);
      return true;
    case MessageType::kSegment: {
      std::lock_guard<std::mutex> lock(mutex_);
      return requests_.Add(message.segment, packet.fd, message.length, error);
    }
    case MessageType::kSegmentClose: {
      std::lock_guard<std::mutex> lock(mutex_);
      requests_.Remove(message.segment);
      return true;
    }
    case MessageType::kRelease:
      return HandleRelease(message, error);
    default:
      *error = "it sent message " + std::to_string(message.type) + ", which a worker does not send where it calls";
      return false;
  }
}

// ---- the thread that reads -------------------------------------------------------------------------------------------

// Reads all messages that are there. Returns false at the end of the connection, with a reason unless the worker closed
// it.
bool Caller::Read(std::string* error) {
  Packet packet;
  for (;;) {
    switch (ReceivePacket(fd_, &packet, error)) {
      case Received::kNothing:
        return true;
      case Received::kPacket:
        if (!Handle(packet, error)) return false;
        break;
      case Received::kReset:
        break;
      default:
        return false;
    }
  }
}

void Caller::Tick(uint64_t now_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  Flush();
  AnswerWaiting();
  for (const uint32_t id : responses_.Trim(now_ns, context_->arena_idle_ms * kMillisecond)) {
    Message message = MessageOf(MessageType::kSegmentClose);
    message.segment = id;
    Post(message);
  }
}

// Reads until the connection ends. Returns the reason, or "" if the worker closed it.
std::string Caller::Serve() {
  bool process_ended = false;
  std::string error;
  for (;;) {
    pollfd watched[3] = {{fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}, {process_fd_, POLLIN, 0}};
    int timeout_ms = -1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return error;
      if (!outbox_.empty()) watched[0].events |= POLLOUT;
      if (!outbox_.empty() || !waiting_.empty() || responses_.size() > kFirstSegmentBytes) timeout_ms = kTickMs;
    }
    if (poll(watched, process_fd_ >= 0 ? 3 : 2, process_ended ? 0 : timeout_ms) < 0 && errno != EINTR) {
      return Errno("poll");
    }
    uint64_t ignored;
    if ((watched[1].revents & POLLIN) != 0 && read(wake_fd_, &ignored, sizeof(ignored)) < 0 && errno != EAGAIN) {
      PYTRITON_LOG(ERROR, Errno("reading an event"));
    }
    bool open = true;
    if ((watched[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
      try {
        open = Read(&error);
      } catch (const std::exception& exception) {
        error = std::string("a call could not be made: ") + exception.what();
        open = false;
      }
    }
    if (!open || process_ended) return error;
    // Messages that the worker sent before it ended are read first.
    process_ended = process_fd_ >= 0 && (watched[2].revents & POLLIN) != 0;
    Tick(NowNs());
  }
}

void Caller::Run() {
  const std::string error = Serve();
  Close(error.empty() ? "it closed its connection" : error, !error.empty());
  metrics_.Clear();
  ended_.store(true, std::memory_order_release);
}

void Caller::Close(const std::string& reason, bool broken) {
  std::lock_guard<std::mutex> lock(mutex_);
  CloseLocked(reason, broken);
}

void Caller::CloseLocked(const std::string& reason, bool broken) {
  if (closed_) return;
  closed_ = true;
  context_->readiness->Forget(this);
  shutdown(fd_, SHUT_RDWR);
  Wake();
  const std::string text = context_->model.Begin() + "the calls of " + label_ + " have ended: " + reason;
  if (broken) {
    PYTRITON_LOG(ERROR, text);
  } else {
    PYTRITON_LOG(VERBOSE, text);
  }
  for (auto& [number, call] : calls_) call->Cancel();
  calls_.clear();
  waiting_.clear();
  for (const Outgoing& outgoing : outbox_) {
    if (outgoing.fd >= 0) close(outgoing.fd);
  }
  outbox_.clear();
  requests_.Clear();
}

}  // namespace pytriton
