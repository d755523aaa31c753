#include "calls.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "arena.h"
#include "errno_text.h"
#include "late_ends.h"
#include "packet.h"
#include "record.h"
#include "triton_util.h"

namespace pytriton {

namespace {

constexpr int kTickMs = 1000;
// How long an answer waits for room in the arena while the worker keeps what lies there.
constexpr uint64_t kArenaTimeoutNs = 30000 * kMillisecond;
constexpr uint64_t kSendTimeoutNs = kSendTimeoutMs * kMillisecond;
// Loads and unloads of one worker that go on at the same time; each has a thread.
constexpr int kMaxControls = 64;
// Connections for calls to one endpoint; each has a thread, too.
constexpr size_t kMaxCallers = 1024;
// An error that is longer takes a record.
constexpr size_t kMaxFailText = kMaxPacket - sizeof(Message);
constexpr uint64_t kFirstSegment = 1u << 20;

// An error of a call: Triton's code and its text, which may be empty; or none.
struct Failure {
  TRITONSERVER_Error_Code code = TRITONSERVER_ERROR_INTERNAL;
  std::string text;
  bool failed = false;

  Failure() = default;
  Failure(TRITONSERVER_Error_Code error_code, std::string error_text)
      : code(error_code), text(error_text.empty() ? "unknown error" : std::move(error_text)), failed(true) {}
  explicit operator bool() const { return failed; }
};

// Takes the error over.
Failure Take(TRITONSERVER_Error* error) {
  if (error == nullptr) return {};
  const TRITONSERVER_Error_Code code = TRITONSERVER_ErrorCode(error);
  return {code, TakeMessage(error)};
}

Failure Lacking(const char* what) {
  return {TRITONSERVER_ERROR_UNSUPPORTED, std::string("this tritonserver has no ") + what};
}

#define PYTRITON_FAIL_IF(call)                \
  do {                                        \
    Failure pytriton_failure = Take(call);    \
    if (pytriton_failure) return pytriton_failure; \
  } while (false)

double AsDouble(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint64_t AsBits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Parameters of Triton's, which belong to the list.
class Parameters {
 public:
  ~Parameters() {
    for (const auto* parameter : list_) TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(parameter));
  }
  void Add(TRITONSERVER_Parameter* parameter) { list_.push_back(parameter); }
  const TRITONSERVER_Parameter** data() { return list_.data(); }
  uint64_t size() const { return list_.size(); }

 private:
  std::vector<const TRITONSERVER_Parameter*> list_;
};

// ---- memory of outputs, until they are copied into the arena -------------------------------------------------------

TRITONSERVER_Error* AllocateOutput(
    TRITONSERVER_ResponseAllocator*, const char* name, size_t size, TRITONSERVER_MemoryType, int64_t, void*,
    void** buffer, void** buffer_userp, TRITONSERVER_MemoryType* memory, int64_t* device) {
  *memory = TRITONSERVER_MEMORY_CPU;
  *device = 0;
  *buffer = nullptr;
  *buffer_userp = nullptr;
  if (size == 0 || posix_memalign(buffer, kAlignment, size) == 0) return nullptr;
  return MakeError(
      TRITONSERVER_ERROR_UNAVAILABLE,
      "no memory for output '" + std::string(name) + "' of " + std::to_string(size) + " bytes");
}

TRITONSERVER_Error* FreeOutput(
    TRITONSERVER_ResponseAllocator*, void* buffer, void*, size_t, TRITONSERVER_MemoryType, int64_t) {
  free(buffer);
  return nullptr;
}

struct DeleteResponse {
  void operator()(TRITONSERVER_InferenceResponse* response) const {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceResponseDelete(response), "deleting a response");
  }
};
using Response = std::unique_ptr<TRITONSERVER_InferenceResponse, DeleteResponse>;

}  // namespace

// ---- one call --------------------------------------------------------------------------------------------------------

struct Call {
  Call(std::shared_ptr<Caller> by, const Message& message, bool is_stream)
      : caller(std::move(by)),
        number(message.batch),
        segment(message.segment),
        offset(message.offset),
        stream(is_stream),
        holds_block(message.length != 0) {}

  const std::shared_ptr<Caller> caller;
  const uint64_t number;
  const uint32_t segment;  // the place of its record
  const uint64_t offset;
  const bool stream;  // any number of responses may come

  // Of the reader until Triton has the request, and then of nobody: what the inputs lie in.
  std::shared_ptr<Segment> memory;
  // Payloads of strings, which a target is to find as they were checked. One that is added leaves the others where they
  // are: Triton has their addresses, of short ones, too, which lie in the string itself.
  std::deque<std::string> strings;

  // Guarded by the caller's mutex.
  bool holds_block;    // the worker has not been told that its record is free again
  bool done = false;   // the last answer is on its way

  void SetRequest(TRITONSERVER_InferenceRequest* request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (request_ != nullptr) InnerRequests::Remove(request_);
    request_ = request;
    if (request_ != nullptr) InnerRequests::Add(request_);
  }
  bool HasRequest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return request_ != nullptr;
  }
  void Cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (request_ != nullptr) PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceRequestCancel(request_), "cancelling a call");
  }

 private:
  std::mutex mutex_;
  TRITONSERVER_InferenceRequest* request_ = nullptr;  // while Triton has it
};

// ---- one worker ------------------------------------------------------------------------------------------------------

// A thread reads what the worker wants; answers are sent by whatever thread has them, as far as the socket and the
// arena have room, and by that thread when they have.
class Caller : public std::enable_shared_from_this<Caller> {
 public:
  Caller(int fd, std::string label, std::shared_ptr<const CallContext> context)
      : fd_(fd),
        process_fd_(ProcessOf(fd)),
        wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        label_(std::move(label)),
        context_(std::move(context)),
        requests_(context_->arena_budget_bytes),
        responses_(context_->arena_budget_bytes) {}
  ~Caller() {
    for (const int fd : {fd_, process_fd_, wake_fd_}) {
      if (fd >= 0) close(fd);
    }
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  void Start() {
    if (wake_fd_ < 0) throw std::runtime_error(Errno("eventfd"));
    thread_ = std::thread([self = shared_from_this()] { self->Run(); });
  }
  // Ends the connection, and waits for its thread.
  void Stop() {
    Close("the model is unloaded", false);
    if (thread_.joinable()) thread_.join();
  }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

  // Of Triton's threads: a response of a call, null where there is none; and the end of its request.
  void Respond(const std::shared_ptr<Call>& call, Response response, bool final);
  void Released(const std::shared_ptr<Call>& call);
  // Ends a call that waits for a question with the number of that.
  void Ask(const std::shared_ptr<Call>& call, uint64_t question) {
    std::lock_guard<std::mutex> lock(mutex_);
    Finish(call, {}, question);
  }

 private:
  // A response that waits for room in the arena.
  struct Answer {
    std::shared_ptr<Call> call;
    Response response;
    bool final;
    uint64_t since_ns;
  };
  // A packet that waits for room in the socket.
  struct Outgoing {
    Message message;
    std::string body;
    int fd;
  };

  void Run();
  bool Read(std::string* error);
  bool Handle(const Packet& packet, std::string* error);
  bool HandleCall(const Packet& packet, std::string* error);
  void Tick(uint64_t now_ns);
  void Close(const std::string& reason, bool broken);
  void Wake();

  Failure Infer(const std::shared_ptr<Call>& call, const CallBody& body, const std::string& name, const CallRecord& in);
  TRITONSERVER_InferenceTrace* SpawnTrace(const CallBody& body);
  Failure FillRequest(Call* call, const CallRecord& in, TRITONSERVER_InferenceRequest* request);
  Failure Control(Operation operation, const CallBody& body, const std::string& name, const CallRecord& in);
  Failure MakeFamily(int64_t kind, const std::string& name, const CallRecord& in, uint64_t* number);
  Failure MakeMetric(int64_t family, const CallRecord& in, uint64_t* number);
  Failure UseMetric(Operation operation, const CallBody& body, uint64_t* value);
  void DeleteFamily(uint64_t number);
  Failure Log(const CallBody& body, const std::string& file, const CallRecord& in);

  // Everything below: with the mutex held.
  void Finish(const std::shared_ptr<Call>& call, const Failure& failure, uint64_t value);
  bool TryAnswer(const Answer& answer);
  bool Fail(const std::shared_ptr<Call>& call, const Failure& failure, bool final);
  bool SendRecord(const std::shared_ptr<Call>& call, const ResponseSource& source, bool final);
  bool Allocate(uint64_t length, Block* block, Failure* failure);
  uint16_t Flags(const std::shared_ptr<Call>& call, bool final);
  void AnswerWaiting();
  void Post(Message message, std::string body = "", int fd = -1);
  void Flush();
  void CloseLocked(const std::string& reason, bool broken);

  const int fd_;
  const int process_fd_;
  const int wake_fd_;
  const std::string label_;
  const std::shared_ptr<const CallContext> context_;
  std::thread thread_;
  std::atomic<bool> ended_{false};

  // Of the thread that reads.
  std::map<uint64_t, TRITONSERVER_MetricFamily*> families_;
  struct Metric {
    TRITONSERVER_Metric* metric;
    uint64_t family;
  };
  std::map<uint64_t, Metric> metrics_;
  uint64_t next_number_ = 1;

  std::mutex mutex_;
  bool closed_ = false;
  PeerArena requests_;  // the worker's
  Arena responses_;     // ours
  std::map<uint64_t, std::shared_ptr<Call>> calls_;
  std::deque<Answer> waiting_;
  std::deque<Outgoing> outbox_;
  uint64_t blocked_since_ns_ = 0;  // since when the socket takes nothing
  int controls_ = 0;
};

// ---- what Triton calls -----------------------------------------------------------------------------------------------

namespace {

using CallRef = std::shared_ptr<Call>;

// Nothing thrown below may reach Triton; what is lost by it, is memory.
template <typename Function>
void Guarded(const char* what, Function function) {
  try {
    function();
  } catch (const std::exception& exception) {
    PYTRITON_LOG(ERROR, std::string(what) + ": " + exception.what());
  }
}

void RequestReleased(TRITONSERVER_InferenceRequest* request, const uint32_t, void* userp) {
  const std::unique_ptr<CallRef> ref(static_cast<CallRef*>(userp));
  Guarded("the end of a call", [&] {
    (*ref)->SetRequest(nullptr);
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceRequestDelete(request), "deleting a request");
    (*ref)->caller->Released(*ref);
  });
}

void ResponseComplete(TRITONSERVER_InferenceResponse* response, const uint32_t flags, void* userp) {
  auto* ref = static_cast<CallRef*>(userp);
  const bool final = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  Response owned(response);
  Guarded("the response of a call", [&] { (*ref)->caller->Respond(*ref, std::move(owned), final); });
  if (final) delete ref;
}

}  // namespace

// ---- inference -------------------------------------------------------------------------------------------------------

Failure Caller::FillRequest(Call* call, const CallRecord& in, TRITONSERVER_InferenceRequest* request) {
  const RequestEntry& entry = in.entry();
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetId(request, in.id()));
  if (*in.correlation_string() != 0) {
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetCorrelationIdString(request, in.correlation_string()));
  } else {
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetCorrelationId(request, entry.correlation_id));
  }
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetFlags(request, entry.flags));
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(request, entry.timeout_us));
  if (entry.priority != 0) PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetPriorityUInt64(request, entry.priority));
  for (const auto& parameter : in.Parameters()) {
    switch (parameter.type) {
      case TRITONSERVER_PARAMETER_STRING:
        PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetStringParameter(request, parameter.key, parameter.text));
        break;
      case TRITONSERVER_PARAMETER_INT:
        PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetIntParameter(
            request, parameter.key, static_cast<int64_t>(parameter.value)));
        break;
      case TRITONSERVER_PARAMETER_BOOL:
        PYTRITON_FAIL_IF(
            TRITONSERVER_InferenceRequestSetBoolParameter(request, parameter.key, parameter.value != 0));
        break;
      default:
        PYTRITON_FAIL_IF(
            TRITONSERVER_InferenceRequestSetDoubleParameter(request, parameter.key, AsDouble(parameter.value)));
    }
  }
  for (const auto& tensor : in.tensors()) {
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestAddInput(
        request, tensor.name, static_cast<TRITONSERVER_DataType>(tensor.dtype), tensor.dims, tensor.dims_count));
    const void* data = tensor.payload;
    if (tensor.dtype == TRITONSERVER_TYPE_BYTES) {
      // Whoever gets them goes by the lengths in them, which the worker could still change.
      const std::string& copy =
          call->strings.emplace_back(reinterpret_cast<const char*>(tensor.payload), tensor.payload_length);
      data = copy.data();
      std::string error;
      if (!FitsShape(tensor.dtype, tensor.dims, tensor.dims_count, reinterpret_cast<const uint8_t*>(copy.data()),
                     copy.size(), &error)) {
        return {TRITONSERVER_ERROR_INVALID_ARG, std::string("input '") + tensor.name + "' is " + error};
      }
    }
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestAppendInputData(
        request, tensor.name, data, tensor.payload_length, TRITONSERVER_MEMORY_CPU, 0));
  }
  for (const char* output : in.Outputs()) {
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestAddRequestedOutput(request, output));
  }
  return {};
}

// Null where the request for which the call is made is not traced, or answered already.
TRITONSERVER_InferenceTrace* Caller::SpawnTrace(const CallBody& body) {
  TRITONSERVER_InferenceTrace* child = nullptr;
  if (body.parent_batch == 0 || TRITONSERVER_InferenceTraceSpawnChildTrace == nullptr) return child;
  context_->use_request(body.parent_batch, body.parent_request, [&child](TRITONBACKEND_Request* parent) {
    TRITONSERVER_InferenceTrace* trace = nullptr;
    if (!TakeMessage(TRITONBACKEND_RequestTrace(parent, &trace)).empty() || trace == nullptr) return;
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceTraceSpawnChildTrace(trace, &child), "the trace of a call");
  });
  return child;
}

// The texts are those of Triton's Python backend, whose models look for them.
Failure Caller::Infer(
    const std::shared_ptr<Call>& call, const CallBody& body, const std::string& name, const CallRecord& in) {
  const auto submit = [&]() -> Failure {
    bool is_ready = false;
    PYTRITON_FAIL_IF(TRITONSERVER_ServerModelIsReady(context_->server, name.c_str(), body.subject, &is_ready));
    if (!is_ready) {
      return {TRITONSERVER_ERROR_INTERNAL,
              "Failed for execute the inference request. Model '" + name + "' is not ready."};
    }
    uint32_t properties = 0;
    PYTRITON_FAIL_IF(TRITONSERVER_ServerModelTransactionProperties(
        context_->server, name.c_str(), body.subject, &properties, nullptr));
    if (!call->stream && (properties & TRITONSERVER_TXN_DECOUPLED) != 0) {
      return {TRITONSERVER_ERROR_INTERNAL,
              "Model " + name +
                  " is using the decoupled. The current BLS request call doesn't support models using the decoupled "
                  "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
                  "decoupled models.'"};
    }
    TRITONSERVER_InferenceRequest* request = nullptr;
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestNew(&request, context_->server, name.c_str(), body.subject));
    auto released = std::make_unique<CallRef>(call);
    auto completed = std::make_unique<CallRef>(call);
    const auto send = [&]() -> Failure {
      PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetReleaseCallback(request, RequestReleased, released.get()));
      Failure failure = FillRequest(call.get(), in, request);
      if (failure) return failure;
      PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetResponseCallback(
          request, context_->allocator, nullptr, ResponseComplete, completed.get()));
      // It may be answered, released and deleted before the call returns; only what fails leaves it here.
      call->SetRequest(request);
      TRITONSERVER_InferenceTrace* trace = SpawnTrace(body);
      failure = Take(TRITONSERVER_ServerInferAsync(context_->server, request, trace));
      if (!failure) return failure;
      // The trace is left alone: of a request that was found wrong it is still ours, and of one that was refused later, as
      // by a full queue, it is released and deleted already. Nothing tells the two apart, and the first costs memory only.
      call->SetRequest(nullptr);
      return failure;
    };
    const Failure failure = send();
    if (failure) {
      PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceRequestDelete(request), "deleting a request");
    } else {
      released.release();
      completed.release();
    }
    return failure;
  };
  Failure failure = submit();
  if (failure) {
    failure = {TRITONSERVER_ERROR_INTERNAL, "Model " + name + " - Error when running inference: " + failure.text};
  }
  return failure;
}

void Caller::Respond(const std::shared_ptr<Call>& call, Response response, bool final) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Whoever wants one response has it with the first.
  Answer answer{call, std::move(response), final || !call->stream, NowNs()};
  // Answers of one call keep their order; a small one need not wait for a large one of another.
  const bool waits = std::any_of(
      waiting_.begin(), waiting_.end(), [&call](const Answer& before) { return before.call == call; });
  if (closed_ || call->done || (!waits && TryAnswer(answer))) return;
  waiting_.push_back(std::move(answer));
  Wake();
}

void Caller::Released(const std::shared_ptr<Call>& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  call->memory.reset();
  // The last answer says so, where it is still to come and comes soon.
  if (closed_ || !call->holds_block || (!call->done && !call->stream)) return;
  call->holds_block = false;
  Message message{};
  message.type = static_cast<uint16_t>(MessageType::kRelease);
  message.segment = call->segment;
  message.offset = call->offset;
  Post(message);
}

// ---- answers ---------------------------------------------------------------------------------------------------------

uint16_t Caller::Flags(const std::shared_ptr<Call>& call, bool final) {
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

void Caller::Finish(const std::shared_ptr<Call>& call, const Failure& failure, uint64_t value) {
  if (closed_) return;
  // Of a stream that has ended, Triton may still have the request, and with it the inputs.
  if (!call->HasRequest()) call->memory.reset();
  if (failure) {
    // One that is long needs room in the arena; without any, it is cut off rather than that it waits.
    if (!Fail(call, failure, true)) Fail(call, {failure.code, failure.text.substr(0, kMaxFailText)}, true);
    return;
  }
  Message message{};
  message.type = static_cast<uint16_t>(MessageType::kResult);
  message.flags = Flags(call, true);
  message.batch = call->number;
  message.length = value;
  Post(message);
}

bool Caller::Fail(const std::shared_ptr<Call>& call, const Failure& failure, bool final) {
  if (failure.text.size() > kMaxFailText) {
    ResponseSource source;
    source.flags = kResponseError;
    source.error_code = failure.code;
    source.error = failure.text;
    return SendRecord(call, source, final);
  }
  Message message{};
  message.type = static_cast<uint16_t>(MessageType::kFail);
  message.flags = Flags(call, final);
  message.batch = call->number;
  message.index = failure.code;
  Post(message, failure.text);
  return true;
}

bool Caller::Allocate(uint64_t length, Block* block, Failure* failure) {
  Arena::Result result = responses_.Allocate(length, block);
  if (result == Arena::Result::kFull && length <= responses_.budget()) {
    // Segments that were made for smaller answers make way for a larger one.
    for (const uint32_t id : responses_.DropUnused()) {
      Message message{};
      message.type = static_cast<uint16_t>(MessageType::kSegmentClose);
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
    Message message{};
    message.type = static_cast<uint16_t>(MessageType::kSegment);
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

// False where it has to wait for room.
bool Caller::SendRecord(const std::shared_ptr<Call>& call, const ResponseSource& source, bool final) {
  BatchLayout layout;
  Failure failure;
  Block block;
  std::string error;
  if (!LayoutResponse(source, &layout, &error)) return Fail(call, {TRITONSERVER_ERROR_INVALID_ARG, error}, final);
  if (!Allocate(layout.record_length, &block, &failure)) return failure ? Fail(call, failure, final) : false;
  WriteResponse(source, layout, call->number, block.data);
  Message message{};
  message.type = static_cast<uint16_t>(MessageType::kResponse);
  message.flags = Flags(call, final);
  message.batch = call->number;
  message.segment = block.segment;
  message.offset = block.offset;
  message.length = layout.record_length;
  Post(message);
  return true;
}

namespace {

// Views on a response of Triton.
Failure ReadResponse(TRITONSERVER_InferenceResponse* response, ResponseSource* source) {
  uint32_t count = 0;
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceResponseParameterCount(response, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const char* key = nullptr;
    TRITONSERVER_ParameterType type;
    const void* value = nullptr;
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceResponseParameter(response, i, &key, &type, &value));
    if (!AddParameter(key, type, value, source)) {
      return {TRITONSERVER_ERROR_INTERNAL, std::string("Unsupported parameter type for parameter '") + key + "'."};
    }
  }
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceResponseOutputCount(response, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    TRITONSERVER_DataType dtype;
    const int64_t* dims = nullptr;
    uint64_t dims_count = 0;
    const void* base = nullptr;
    size_t size = 0;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t device = 0;
    void* userp = nullptr;
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceResponseOutput(
        response, i, &name, &dtype, &dims, &dims_count, &base, &size, &memory, &device, &userp));
    std::string error;
    if (!FitsShape(static_cast<uint32_t>(dtype), dims, dims_count, static_cast<const uint8_t*>(base), size, &error)) {
      return {TRITONSERVER_ERROR_INTERNAL, std::string("output '") + name + "' of the response is " + error};
    }
    TensorSource tensor{};
    tensor.name = name;
    tensor.dtype = static_cast<uint32_t>(dtype);
    tensor.first_dim = static_cast<uint32_t>(source->dims.size());
    tensor.dims_count = static_cast<uint32_t>(dims_count);
    tensor.first_piece = static_cast<uint32_t>(source->pieces.size());
    tensor.piece_count = 1;
    tensor.length = size;
    source->dims.insert(source->dims.end(), dims, dims + dims_count);
    source->pieces.push_back({base, size});
    source->tensors.push_back(tensor);
  }
  return {};
}

}  // namespace

// False where it has to wait for room in the arena. The response stays with whoever calls.
bool Caller::TryAnswer(const Answer& answer) {
  const auto& call = answer.call;
  if (answer.response == nullptr) {
    // The end of a stream has no outputs; anything else has.
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
  std::deque<Answer> left;
  std::set<const Call*> blocked;
  for (Answer& answer : waiting_) {
    bool answered = blocked.count(answer.call.get()) == 0 && TryAnswer(answer);
    if (!answered && NowNs() - answer.since_ns >= kArenaTimeoutNs) {
      Fail(answer.call,
           Failure{
               TRITONSERVER_ERROR_UNAVAILABLE,
               "for " + std::to_string(kArenaTimeoutNs / kMillisecond) + " ms the arena of this worker, " +
                   std::to_string(responses_.budget()) + " bytes, had no room for the outputs: " +
                   std::to_string(responses_.in_use()) +
                   " are in use by outputs that are kept. Raise arena_budget_bytes of the model that calls"},
           answer.final);
      answered = true;
    }
    if (answered) continue;
    blocked.insert(answer.call.get());
    left.push_back(std::move(answer));
  }
  waiting_.swap(left);
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
      if (blocked_since_ns_ == 0) {
        blocked_since_ns_ = NowNs();
        Wake();
      }
      return;
    }
    // The end of the socket is seen by the thread that reads.
    blocked_since_ns_ = 0;
    if (next.fd >= 0) close(next.fd);
    outbox_.pop_front();
  }
}

void Caller::Wake() {
  const uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof(one)) < 0 && errno != EAGAIN) PYTRITON_LOG(ERROR, Errno("waking a thread"));
}

// ---- what the worker wants -------------------------------------------------------------------------------------------

Failure Caller::Control(
    Operation operation, const CallBody& body, const std::string& name, const CallRecord& in) {
  if (operation == Operation::kUnloadModel) {
    return Take(
        body.subject != 0 ? TRITONSERVER_ServerUnloadModelAndDependents(context_->server, name.c_str())
                          : TRITONSERVER_ServerUnloadModel(context_->server, name.c_str()));
  }
  Parameters parameters;
  for (const auto& parameter : in.Parameters()) {
    if (parameter.type != TRITONSERVER_PARAMETER_STRING) {
      return {TRITONSERVER_ERROR_INVALID_ARG, std::string("parameter '") + parameter.key + "' of a load is no text"};
    }
    parameters.Add(TRITONSERVER_ParameterNew(parameter.key, TRITONSERVER_PARAMETER_STRING, parameter.text));
  }
  for (const auto& file : in.tensors()) {
    parameters.Add(TRITONSERVER_ParameterBytesNew(file.name, file.payload, file.payload_length));
  }
  return Take(TRITONSERVER_ServerLoadModelWithParameters(
      context_->server, name.c_str(), parameters.data(), parameters.size()));
}

Failure Caller::MakeFamily(int64_t kind, const std::string& name, const CallRecord& in, uint64_t* number) {
  if (kind < TRITONSERVER_METRIC_KIND_COUNTER || kind > TRITONSERVER_METRIC_KIND_HISTOGRAM) {
    return {TRITONSERVER_ERROR_INVALID_ARG, "Unknown metric kind"};
  }
  const auto parameters = in.Parameters();
  TRITONSERVER_MetricFamily* family = nullptr;
  PYTRITON_FAIL_IF(TRITONSERVER_MetricFamilyNew(
      &family, static_cast<TRITONSERVER_MetricKind>(kind), name.c_str(), parameters.empty() ? "" : parameters[0].text));
  *number = next_number_++;
  families_[*number] = family;
  return {};
}

Failure Caller::MakeMetric(int64_t family, const CallRecord& in, uint64_t* number) {
  const auto found = families_.find(static_cast<uint64_t>(family));
  if (found == families_.end()) return {TRITONSERVER_ERROR_INVALID_ARG, "there is no such metric family"};
  Parameters labels;
  for (const auto& label : in.Parameters()) {
    if (label.type != TRITONSERVER_PARAMETER_STRING) {
      return {TRITONSERVER_ERROR_INVALID_ARG, std::string("label '") + label.key + "' of a metric is no text"};
    }
    labels.Add(TRITONSERVER_ParameterNew(label.key, TRITONSERVER_PARAMETER_STRING, label.text));
  }
  TRITONSERVER_Metric* metric = nullptr;
  if (in.tensors().empty()) {
    PYTRITON_FAIL_IF(TRITONSERVER_MetricNew(&metric, found->second, labels.data(), labels.size()));
  } else {
    if (TRITONSERVER_MetricNewWithArgs == nullptr || TRITONSERVER_MetricArgsSetHistogram == nullptr) {
      return Lacking("histograms");
    }
    const auto& tensor = in.tensors()[0];
    constexpr uint32_t kFp64 = 12;
    if (tensor.dtype != kFp64) return {TRITONSERVER_ERROR_INVALID_ARG, "the buckets of a histogram are FP64"};
    // Triton reads them several times.
    std::vector<double> buckets(tensor.payload_length / sizeof(double));
    if (!buckets.empty()) std::memcpy(buckets.data(), tensor.payload, tensor.payload_length);
    TRITONSERVER_MetricArgs* args = nullptr;
    PYTRITON_FAIL_IF(TRITONSERVER_MetricArgsNew(&args));
    Failure failure = Take(TRITONSERVER_MetricArgsSetHistogram(args, buckets.data(), buckets.size()));
    if (!failure) {
      failure = Take(TRITONSERVER_MetricNewWithArgs(&metric, found->second, labels.data(), labels.size(), args));
    }
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricArgsDelete(args), "deleting the arguments of a metric");
    if (failure) return failure;
  }
  *number = next_number_++;
  metrics_[*number] = {metric, found->first};
  return {};
}

Failure Caller::UseMetric(Operation operation, const CallBody& body, uint64_t* value) {
  const auto found = metrics_.find(static_cast<uint64_t>(body.subject));
  if (found == metrics_.end()) return {TRITONSERVER_ERROR_INVALID_ARG, "there is no such metric"};
  TRITONSERVER_Metric* metric = found->second.metric;
  switch (operation) {
    case Operation::kMetricIncrement:
      return Take(TRITONSERVER_MetricIncrement(metric, body.value));
    case Operation::kMetricSet:
      return Take(TRITONSERVER_MetricSet(metric, body.value));
    case Operation::kMetricObserve:
      return TRITONSERVER_MetricObserve == nullptr ? Lacking("histograms")
                                                   : Take(TRITONSERVER_MetricObserve(metric, body.value));
    case Operation::kMetricValue: {
      double read = 0;
      const Failure failure = Take(TRITONSERVER_MetricValue(metric, &read));
      *value = AsBits(read);
      return failure;
    }
    default:
      metrics_.erase(found);
      return Take(TRITONSERVER_MetricDelete(metric));
  }
}

// First its metrics: Triton refuses a family that has some.
void Caller::DeleteFamily(uint64_t number) {
  for (auto it = metrics_.begin(); it != metrics_.end();) {
    if (it->second.family != number) {
      ++it;
      continue;
    }
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricDelete(it->second.metric), "deleting a metric");
    it = metrics_.erase(it);
  }
  const auto family = families_.find(number);
  PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricFamilyDelete(family->second), "deleting a metric family");
  families_.erase(family);
}

Failure Caller::Log(const CallBody& body, const std::string& file, const CallRecord& in) {
  const auto parameters = in.Parameters();
  if (body.subject < TRITONSERVER_LOG_INFO || body.subject > TRITONSERVER_LOG_VERBOSE || parameters.size() != 1 ||
      parameters[0].type != TRITONSERVER_PARAMETER_STRING) {
    return {TRITONSERVER_ERROR_INVALID_ARG, "a record of the log has a level of Triton's and one text"};
  }
  const auto level = static_cast<TRITONSERVER_LogLevel>(body.subject);
  if (!TRITONSERVER_LogIsEnabled(level)) return {};
  const int line = body.value >= 0 && body.value <= INT32_MAX ? static_cast<int>(body.value) : 0;
  return Take(TRITONSERVER_LogMessage(level, file.c_str(), line, parameters[0].text));
}

bool Caller::HandleCall(const Packet& packet, std::string* error) {
  const Message& message = packet.message;
  CallBody body;
  if (packet.body_length < sizeof(body)) {
    *error = "it sent a call of " + std::to_string(packet.body_length) + " bytes, it has at least " +
             std::to_string(sizeof(body));
    return false;
  }
  std::memcpy(&body, packet.body, sizeof(body));
  const std::string name(
      reinterpret_cast<const char*>(packet.body) + sizeof(body), packet.body_length - sizeof(body));
  const auto operation = static_cast<Operation>(message.index);
  auto call = std::make_shared<Call>(shared_from_this(), message, (message.flags & kFlagStream) != 0);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (message.length != 0) {
      call->memory = requests_.Find(message.segment, message.offset, message.length, error);
      if (!call->memory) {
        *error = "the record of its call lies " + *error;
        return false;
      }
    }
    if (!calls_.emplace(message.batch, call).second) {
      *error = "it made call " + std::to_string(message.batch) + ", which is still under way";
      return false;
    }
  }
  auto record = std::make_shared<CallRecord>();
  Failure failure;
  uint64_t value = 0;
  const bool needs_record = operation == Operation::kInfer || operation == Operation::kMetric ||
                            operation == Operation::kMetricFamily || operation == Operation::kLog ||
                            operation == Operation::kLoadModel;
  if (needs_record) {
    std::string malformed;
    const std::shared_ptr<Segment> memory = call->memory;
    if (!memory) {
      failure = {TRITONSERVER_ERROR_INVALID_ARG, "the call came without its record"};
    } else if (!record->Parse(memory->data() + message.offset, message.length, message.batch, &malformed)) {
      failure = {TRITONSERVER_ERROR_INVALID_ARG, "the record of the call is malformed: " + malformed};
    }
  }
  if (failure) {
    // Answered below.
  } else if (operation == Operation::kInfer) {
    failure = Infer(call, body, name, *record);
    if (!failure) return true;
  } else if (operation == Operation::kLoadModel || operation == Operation::kUnloadModel) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (controls_ < kMaxControls) {
      // Loading takes as long as the model likes; and the model that is unloaded may be the one that calls, so nobody can
      // wait for the thread. It keeps what it uses, but for the server, which waits for it, and this library, which stays.
      std::thread([self = shared_from_this(), call, record, body, name, operation] {
        Failure result{TRITONSERVER_ERROR_UNAVAILABLE, "no memory is left for it"};
        Guarded("loading or unloading a model", [&] { result = self->Control(operation, body, name, *record); });
        std::lock_guard<std::mutex> done(self->mutex_);
        --self->controls_;
        self->Finish(call, result, 0);
      }).detach();
      ++controls_;
      return true;
    }
    failure = {TRITONSERVER_ERROR_UNAVAILABLE,
               "the worker loads or unloads " + std::to_string(kMaxControls) + " models already"};
  } else if (operation == Operation::kModelReady) {
    bool is_ready = false;
    failure = Take(TRITONSERVER_ServerModelIsReady(context_->server, name.c_str(), body.subject, &is_ready));
    value = is_ready;
  } else if (operation == Operation::kReadiness) {
    context_->readiness->Wait(
        this, [call](uint64_t question) { call->caller->Ask(call, question); }, static_cast<uint64_t>(body.subject),
        {body.value != 0, name});
    return true;
  } else if (operation == Operation::kLog) {
    failure = Log(body, name, *record);
  } else if (operation >= Operation::kMetricFamily && operation <= Operation::kMetricFamilyDelete) {
    if (TRITONSERVER_MetricFamilyNew == nullptr) {
      failure = Lacking("metrics of models");
    } else if (operation == Operation::kMetricFamily) {
      failure = MakeFamily(body.subject, name, *record, &value);
    } else if (operation == Operation::kMetric) {
      failure = MakeMetric(body.subject, *record, &value);
    } else if (operation != Operation::kMetricFamilyDelete) {
      failure = UseMetric(operation, body, &value);
    } else if (families_.count(static_cast<uint64_t>(body.subject)) != 0) {
      DeleteFamily(static_cast<uint64_t>(body.subject));
    } else {
      failure = {TRITONSERVER_ERROR_INVALID_ARG, "there is no such metric family"};
    }
  } else {
    failure = {TRITONSERVER_ERROR_UNSUPPORTED,
               "this proxy backend knows no operation " + std::to_string(message.index) + ": it is older than the worker"};
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Finish(call, failure, value);
  return true;
}

bool Caller::Handle(const Packet& packet, std::string* error) {
  const Message& message = packet.message;
  switch (static_cast<MessageType>(message.type)) {
    case MessageType::kCall:
      return HandleCall(packet, error);
    case MessageType::kCancel: {
      std::shared_ptr<Call> call;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = calls_.find(message.batch);
        // What is done already cannot be cancelled.
        if (found != calls_.end()) call = found->second;
      }
      if (call) call->Cancel();
      return true;
    }
    case MessageType::kSegment: {
      std::lock_guard<std::mutex> lock(mutex_);
      return requests_.Add(message.segment, packet.fd, message.length, error);
    }
    case MessageType::kSegmentClose: {
      std::lock_guard<std::mutex> lock(mutex_);
      requests_.Remove(message.segment);
      return true;
    }
    case MessageType::kRelease: {
      std::lock_guard<std::mutex> lock(mutex_);
      if (responses_.Release(message.segment, message.offset)) {
        AnswerWaiting();
        return true;
      }
      *error = "it released the block at " + std::to_string(message.offset) + " of segment " +
               std::to_string(message.segment) + ", which is not in use";
      return false;
    }
    default:
      *error = "it sent message " + std::to_string(message.type) + ", which a worker does not send where it calls";
      return false;
  }
}

// ---- the thread that reads -------------------------------------------------------------------------------------------

// Reads what is there. False at the end of the connection, with the reason where it was not the worker that closed it.
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
    Message message{};
    message.type = static_cast<uint16_t>(MessageType::kSegmentClose);
    message.segment = id;
    Post(message);
  }
  if (blocked_since_ns_ != 0 && now_ns > blocked_since_ns_ && now_ns - blocked_since_ns_ > kSendTimeoutNs) {
    CloseLocked("it read nothing from its socket for " + std::to_string(kSendTimeoutMs / 1000) + " s", true);
  }
}

void Caller::Run() {
  bool process_ended = false;
  std::string error;
  for (;;) {
    pollfd watched[3] = {{fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}, {process_fd_, POLLIN, 0}};
    int timeout_ms = -1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) break;
      if (!outbox_.empty()) watched[0].events |= POLLOUT;
      if (!outbox_.empty() || !waiting_.empty() || responses_.size() > kFirstSegment) timeout_ms = kTickMs;
    }
    if (poll(watched, process_fd_ >= 0 ? 3 : 2, process_ended ? 0 : timeout_ms) < 0 && errno != EINTR) {
      error = Errno("poll");
      break;
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
    if (!open || process_ended) break;
    // What it has sent before is read first.
    process_ended = process_fd_ >= 0 && (watched[2].revents & POLLIN) != 0;
    Tick(NowNs());
  }
  Close(error.empty() ? "it closed its connection" : error, !error.empty());
  for (auto& [number, metric] : metrics_) {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricDelete(metric.metric), "deleting a metric");
  }
  metrics_.clear();
  for (auto& [number, family] : families_) {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricFamilyDelete(family), "deleting a metric family");
  }
  families_.clear();
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
  const std::string text = "model '" + context_->model.name + "' version " + std::to_string(context_->model.version) +
                           ": the calls of " + label_ + " have ended: " + reason;
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

// ---- all of them -----------------------------------------------------------------------------------------------------

TRITONSERVER_Error* OfferCalls(TRITONBACKEND_Model* model, const ModelIdentity& identity, Endpoint* endpoint) {
  // One for the life of the process: responses that are on their way when a model goes still need it.
  static TRITONSERVER_ResponseAllocator* const allocator = [] {
    TRITONSERVER_ResponseAllocator* made = nullptr;
    PYTRITON_LOG_IF_ERROR(
        TRITONSERVER_ResponseAllocatorNew(&made, AllocateOutput, FreeOutput, nullptr), "response allocator");
    return made;
  }();
  TRITONSERVER_Server* server = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ModelServer(model, &server); error != nullptr) return error;
  const Settings& settings = endpoint->settings();
  endpoint->OfferCalls(std::make_unique<Calls>(
      CallContext{server, allocator, identity, settings.arena_budget_bytes, settings.arena_idle_ms,
                  [endpoint](uint64_t batch, uint32_t index, const auto& use) { endpoint->UseRequest(batch, index, use); }}));
  return nullptr;
}

Calls::~Calls() {
  for (const auto& caller : callers_) caller->Stop();
}

void Calls::Serve(int fd, const std::string& label) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto ended = std::partition(
      callers_.begin(), callers_.end(), [](const auto& caller) { return !caller->ended(); });
  for (auto it = ended; it != callers_.end(); ++it) (*it)->Stop();
  callers_.erase(ended, callers_.end());
  auto caller = std::make_shared<Caller>(fd, label, context_);
  try {
    if (callers_.size() >= kMaxCallers) throw std::runtime_error("too many connections for calls");
    caller->Start();
  } catch (const std::exception& exception) {
    PYTRITON_LOG(ERROR, label + " cannot call: " + exception.what());
    return;
  }
  callers_.push_back(std::move(caller));
}

}  // namespace pytriton
