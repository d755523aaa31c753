#include "inference.h"

#include <cstring>
#include <mutex>
#include <new>

#include "../proxy/text/utf8.h"
#include "../proxy/triton/triton_api.h"
#include "protobuf.h"

extern "C" {
TRITONSERVER_Error* TRITONSERVER_InferenceResponseId(TRITONSERVER_InferenceResponse* response, const char** id);
const char* TRITONSERVER_DataTypeString(TRITONSERVER_DataType type);
TRITONSERVER_DataType TRITONSERVER_StringToDataType(const char* name);
uint32_t TRITONSERVER_DataTypeByteSize(TRITONSERVER_DataType type);
TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorSetQueryFunction(
    TRITONSERVER_ResponseAllocator* allocator,
    TRITONSERVER_Error* (*query)(TRITONSERVER_ResponseAllocator*, void* userp, const char* name, size_t* size,
                                 TRITONSERVER_MemoryType* type, int64_t* id));
}

// The functions are weak because this library is also loaded into programs without Triton, in which it does nothing.
#define PYTRITON_WEAK(name) _Pragma(PYTRITON_TEXT(weak TRITONSERVER_##name))
#define PYTRITON_TEXT(text) #text
PYTRITON_WEAK(ErrorNew)
PYTRITON_WEAK(ErrorDelete)
PYTRITON_WEAK(ErrorCode)
PYTRITON_WEAK(ErrorMessage)
PYTRITON_WEAK(DataTypeString)
PYTRITON_WEAK(StringToDataType)
PYTRITON_WEAK(ServerModelTransactionProperties)
PYTRITON_WEAK(ResponseAllocatorNew)
PYTRITON_WEAK(ResponseAllocatorSetQueryFunction)
PYTRITON_WEAK(InferenceRequestCancel)
PYTRITON_WEAK(InferenceRequestSetId)
PYTRITON_WEAK(InferenceRequestSetFlags)
PYTRITON_WEAK(InferenceRequestSetCorrelationId)
PYTRITON_WEAK(InferenceRequestSetCorrelationIdString)
PYTRITON_WEAK(InferenceRequestSetPriorityUInt64)
PYTRITON_WEAK(InferenceRequestSetTimeoutMicroseconds)
PYTRITON_WEAK(InferenceRequestSetStringParameter)
PYTRITON_WEAK(InferenceRequestSetIntParameter)
PYTRITON_WEAK(InferenceRequestSetBoolParameter)
PYTRITON_WEAK(InferenceRequestSetDoubleParameter)
PYTRITON_WEAK(InferenceRequestSetReleaseCallback)
PYTRITON_WEAK(InferenceRequestSetResponseCallback)
PYTRITON_WEAK(InferenceResponseError)
PYTRITON_WEAK(InferenceResponseDelete)
PYTRITON_WEAK(InferenceResponseModel)
PYTRITON_WEAK(InferenceResponseId)
PYTRITON_WEAK(InferenceResponseParameterCount)
PYTRITON_WEAK(InferenceResponseParameter)
PYTRITON_WEAK(InferenceResponseOutputCount)
PYTRITON_WEAK(InferenceResponseOutput)

namespace pytriton::grpc {

namespace {

constexpr uint32_t kSequenceStart = 1;
constexpr uint32_t kSequenceEnd = 2;
// A smaller output is copied behind the fields before it, which costs less than a part of its own.
constexpr size_t kSmallOutput = 1024;

// --- errors ----------------------------------------------------------------------------------------------------------

Code CodeOf(TRITONSERVER_Error_Code code) {
  switch (code) {
    case TRITONSERVER_ERROR_INTERNAL:
      return Code::kInternal;
    case TRITONSERVER_ERROR_NOT_FOUND:
      return Code::kNotFound;
    case TRITONSERVER_ERROR_INVALID_ARG:
      return Code::kInvalidArgument;
    case TRITONSERVER_ERROR_UNAVAILABLE:
      return Code::kUnavailable;
    case TRITONSERVER_ERROR_UNSUPPORTED:
      return Code::kUnimplemented;
    case TRITONSERVER_ERROR_ALREADY_EXISTS:
      return Code::kAlreadyExists;
    case TRITONSERVER_ERROR_CANCELLED:
      return Code::kCancelled;
    default:
      return Code::kUnknown;
  }
}

// Returns the code of Triton that is reported for a gRPC code.
int CodeOfTriton(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
    case Code::kNotFound:
    case Code::kAlreadyExists:
    case Code::kPermissionDenied:
    case Code::kResourceExhausted:
    case Code::kUnimplemented:
      return TRITONSERVER_ERROR_INVALID_ARG;
    case Code::kUnavailable:
      return TRITONSERVER_ERROR_UNAVAILABLE;
    case Code::kCancelled:
    case Code::kDeadlineExceeded:
      return TRITONSERVER_ERROR_CANCELLED;
    default:
      return TRITONSERVER_ERROR_INTERNAL;
  }
}

// Takes an error of Triton over. Returns true and sets the status if there is one.
bool Take(TRITONSERVER_Error* error, Status* status) {
  if (error == nullptr) return false;
  *status = {CodeOf(TRITONSERVER_ErrorCode(error)), TRITONSERVER_ErrorMessage(error)};
  // Readers of a stream recognize an error by its text, so it must not be empty.
  if (status->text.empty()) status->text = "an error without a text that says why";
  TRITONSERVER_ErrorDelete(error);
  return true;
}

// --- writing a response ----------------------------------------------------------------------------------------------

// Writes a text of a model. Bytes that are not UTF-8 are replaced, because a caller could not read the message
// otherwise.
void WriteText(std::string* out, uint32_t number, std::string_view text) {
  constexpr std::string_view kReplacement = "\xef\xbf\xbd";
  size_t good = Utf8Prefix(text);
  if (good == text.size()) return WriteBytes(out, number, text);
  std::string readable;
  while (good < text.size()) {
    readable.append(text.substr(0, good)).append(kReplacement);
    text.remove_prefix(good + 1);
    good = Utf8Prefix(text);
  }
  WriteBytes(out, number, readable.append(text));
}

void WriteParameter(std::string* out, std::string_view name, std::string_view value) {
  std::string entry;
  WriteText(&entry, 1, name);
  WriteBytes(&entry, 2, value);
  WriteBytes(out, 4, entry);
}

void WriteBoolParameter(std::string* out, std::string_view name, bool value) {
  const char bytes[] = {1 << 3 | kVarint, static_cast<char>(value)};
  WriteParameter(out, name, {bytes, sizeof(bytes)});
}

// A ModelInferResponse in pieces: the fields before each large output, and the outputs.
struct Pieces {
  std::string& text() {
    if (parts.empty() || parts.back().raw != nullptr) parts.emplace_back();
    return parts.back().text;
  }
  void AddRaw(std::unique_ptr<char[]> raw, size_t size) {
    parts.emplace_back();
    parts.back().raw = std::move(raw);
    parts.back().raw_size = size;
  }
  size_t size() const {
    size_t sum = 0;
    for (const Part& part : parts) sum += part.raw != nullptr ? part.raw_size : part.text.size();
    return sum;
  }

  struct Part {
    std::string text;
    std::unique_ptr<char[]> raw;
    size_t raw_size = 0;
  };
  std::vector<Part> parts;
};

// Makes the message of a response. In a stream, `error` is a part of the message.
Message MakeMessage(Method method, Pieces pieces, const std::string& error) {
  std::string head;
  if (method == Method::kStreamInfer) {
    if (!error.empty()) WriteText(&head, 1, error);
    WriteTag(&head, 2, kBytes);
    WriteVarint(&head, pieces.size());
  }
  Message message;
  const auto add_text = [&message](const std::string& first, const std::string& second) {
    Chunk chunk;
    chunk.size = first.size() + second.size();
    if (chunk.size == 0) return;
    chunk.data.reset(new char[chunk.size]);
    std::memcpy(chunk.data.get(), first.data(), first.size());
    std::memcpy(chunk.data.get() + first.size(), second.data(), second.size());
    message.push_back(std::move(chunk));
  };
  if (pieces.parts.empty() || pieces.parts.front().raw != nullptr) add_text(head, "");
  for (size_t i = 0; i < pieces.parts.size(); ++i) {
    Pieces::Part& part = pieces.parts[i];
    if (part.raw != nullptr) {
      message.push_back({std::move(part.raw), part.raw_size});
    } else {
      add_text(i == 0 ? head : std::string(), part.text);
    }
  }
  return message;
}

// The memory of one output, from Triton's request for it until the response is deleted.
struct OutputMemory {
  std::unique_ptr<char[]> data;
};

TRITONSERVER_Error* Allocate(TRITONSERVER_ResponseAllocator*, const char* name, size_t size, TRITONSERVER_MemoryType,
                             int64_t, void*, void** buffer, void** buffer_user, TRITONSERVER_MemoryType* type,
                             int64_t* id) {
  *buffer = *buffer_user = nullptr;
  *type = TRITONSERVER_MEMORY_CPU;
  *id = 0;
  if (size == 0) return nullptr;
  auto memory = std::unique_ptr<OutputMemory>(new (std::nothrow) OutputMemory);
  if (memory != nullptr) memory->data.reset(new (std::nothrow) char[size]);
  if (memory == nullptr || memory->data == nullptr) {
    const std::string text = "There is no memory for output '" + std::string(name) + "' of " + std::to_string(size) + " bytes.";
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, text.c_str());
  }
  *buffer = memory->data.get();
  *buffer_user = memory.release();
  return nullptr;
}

TRITONSERVER_Error* Free(TRITONSERVER_ResponseAllocator*, void*, void* buffer_user, size_t, TRITONSERVER_MemoryType,
                         int64_t) {
  delete static_cast<OutputMemory*>(buffer_user);
  return nullptr;
}

// Says where an output would lie, for a backend that asks before it has the output.
TRITONSERVER_Error* Query(TRITONSERVER_ResponseAllocator*, void*, const char*, size_t*, TRITONSERVER_MemoryType* type,
                          int64_t* id) {
  *type = TRITONSERVER_MEMORY_CPU;
  *id = 0;
  return nullptr;
}

// One allocator for the process, which is never deleted, because responses come until the process ends. Returns null
// with the status if it cannot be made.
TRITONSERVER_ResponseAllocator* Allocator(Status* status) {
  static Status failure;
  static TRITONSERVER_ResponseAllocator* const allocator = [] {
    TRITONSERVER_ResponseAllocator* made = nullptr;
    if (Take(TRITONSERVER_ResponseAllocatorNew(&made, Allocate, Free, nullptr), &failure)) made = nullptr;
    Status ignored;  // if this fails, backends ask for the memory that they prefer
    if (made != nullptr) Take(TRITONSERVER_ResponseAllocatorSetQueryFunction(made, Query), &ignored);
    return made;
  }();
  if (allocator == nullptr) *status = failure;
  return allocator;
}

// --- a request in Triton ---------------------------------------------------------------------------------------------

class Task : public Running, public std::enable_shared_from_this<Task> {
 public:
  Task(Method method, Request request, Chunk message, std::shared_ptr<Responses> responses)
      : method_(method), request_(std::move(request)), message_(std::move(message)), responses_(std::move(responses)) {}

  ~Task() override {
    if (made_ != nullptr) Drop(TRITONSERVER_InferenceRequestDelete(made_));
  }

  void Submit(TRITONSERVER_Server* server) {
    Status status;
    if (Prepare(server, &status)) {
      // Triton holds this until the request is released, and until its last response has come.
      held_by_request_ = held_by_responses_ = shared_from_this();
      if (!Take(TRITONSERVER_ServerInferAsync(server, made_, nullptr), &status)) {
        // The flag is set last, so a request that was released meanwhile is not cancelled.
        const std::lock_guard<std::mutex> lock(mutex_);
        is_submitted_ = true;
        if (is_cancelled_ && made_ != nullptr) Drop(TRITONSERVER_InferenceRequestCancel(made_));
        return;
      }
      held_by_request_.reset();
      held_by_responses_.reset();
    }
    if (method_ == Method::kStreamInfer) {
      // The message has the id alone, so that the caller knows which request failed.
      Pieces pieces;
      WriteBytes(&pieces.text(), 3, request_.id);
      responses_->OnMessage(MakeMessage(method_, std::move(pieces), status.text));
      status = {Code::kOk, "", OutcomeOf(status)};
    }
    responses_->OnEnd(status);
  }

  void Cancel() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(is_cancelled_, true) || !is_submitted_ || made_ == nullptr) return;
    Drop(TRITONSERVER_InferenceRequestCancel(made_));
  }

 private:
  static void Drop(TRITONSERVER_Error* error) {
    if (error != nullptr) TRITONSERVER_ErrorDelete(error);
  }

  // Makes the request. Returns false with the status if Triton refuses a part of it.
  bool Prepare(TRITONSERVER_Server* server, Status* status) {
    uint32_t policy = 0;
    const char* const model = request_.model.c_str();
    if (method_ == Method::kInfer) {
      if (Take(TRITONSERVER_ServerModelTransactionProperties(server, model, request_.version_number, &policy, nullptr),
               status)) {
        return false;
      }
      if ((policy & TRITONSERVER_TXN_DECOUPLED) != 0) {
        *status = {Code::kUnimplemented, "ModelInfer RPC doesn't support models with decoupled transaction policy"};
        return false;
      }
    }
    if (Take(TRITONSERVER_InferenceRequestNew(&made_, server, model, request_.version_number), status)) return false;
    if (Take(TRITONSERVER_InferenceRequestSetId(made_, request_.id.c_str()), status)) return false;
    uint32_t flags = 0;
    for (const Parameter& parameter : request_.parameters) {
      if (Take(SetParameter(parameter, &flags), status)) return false;
    }
    if (Take(TRITONSERVER_InferenceRequestSetFlags(made_, flags), status)) return false;
    for (const Input& input : request_.inputs) {
      if (Take(TRITONSERVER_InferenceRequestAddInput(made_, input.name.c_str(),
                                                     TRITONSERVER_StringToDataType(input.datatype.c_str()),
                                                     input.shape.data(), input.shape.size()),
               status)) {
        return false;
      }
    }
    for (const std::string& output : request_.outputs) {
      if (Take(TRITONSERVER_InferenceRequestAddRequestedOutput(made_, output.c_str()), status)) return false;
    }
    for (size_t i = 0; i < request_.inputs.size(); ++i) {
      if (!AppendInput(i, status)) return false;
    }
    // A model that is not decoupled has one response and no empty one after it.
    wants_empty_final_ = wants_empty_final_ && method_ == Method::kStreamInfer && IsDecoupled(server, request_);
    TRITONSERVER_ResponseAllocator* const allocator = Allocator(status);
    return allocator != nullptr &&
           !Take(TRITONSERVER_InferenceRequestSetReleaseCallback(made_, OnRelease, this), status) &&
           !Take(TRITONSERVER_InferenceRequestSetResponseCallback(made_, allocator, nullptr, OnResponse, this), status);
  }

  bool AppendInput(size_t index, Status* status) {
    const Input& input = request_.inputs[index];
    const char* data = nullptr;
    size_t size = input.elements_bytes;
    if (input.has_elements) {
      // This memory was counted when the input was added.
      std::unique_ptr<char[]> made(new (std::nothrow) char[size]);
      if (made == nullptr) {
        *status = {Code::kUnavailable, "There is no memory for input '" + input.name + "' of " + std::to_string(size) + " bytes."};
        return false;
      }
      CopyElements(input, made.get());
      data = made.get();
      elements_.push_back(std::move(made));
    } else {
      data = request_.contents[index].data();
      size = request_.contents[index].size();
    }
    return !Take(TRITONSERVER_InferenceRequestAppendInputData(made_, input.name.c_str(), data, size,
                                                              TRITONSERVER_MEMORY_CPU, 0),
                 status);
  }

  TRITONSERVER_Error* SetParameter(const Parameter& parameter, uint32_t* flags) {
    using Type = Parameter::Type;
    const std::string& name = parameter.name;
    if (name == "sequence_id") {
      return parameter.type == Type::kInt
                 ? TRITONSERVER_InferenceRequestSetCorrelationId(made_, static_cast<uint64_t>(parameter.integer))
                 : TRITONSERVER_InferenceRequestSetCorrelationIdString(made_, parameter.text.c_str());
    }
    if (name == "sequence_start" || name == "sequence_end") {
      if (parameter.truth) *flags |= name == "sequence_start" ? kSequenceStart : kSequenceEnd;
      return nullptr;
    }
    if (name == "priority") {
      const auto priority = parameter.type == Type::kInt ? static_cast<uint64_t>(parameter.integer) : parameter.whole;
      return TRITONSERVER_InferenceRequestSetPriorityUInt64(made_, priority);
    }
    if (name == "timeout") {
      return TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(made_, static_cast<uint64_t>(parameter.integer));
    }
    if (name == kEmptyFinal) {
      wants_empty_final_ = parameter.truth;
      return nullptr;
    }
    switch (parameter.type) {
      case Type::kInt:
        return TRITONSERVER_InferenceRequestSetIntParameter(made_, name.c_str(), parameter.integer);
      case Type::kBool:
        return TRITONSERVER_InferenceRequestSetBoolParameter(made_, name.c_str(), parameter.truth);
      case Type::kDouble:
        return TRITONSERVER_InferenceRequestSetDoubleParameter(made_, name.c_str(), parameter.number);
      default:
        return TRITONSERVER_InferenceRequestSetStringParameter(made_, name.c_str(), parameter.text.c_str());
    }
  }

  static void OnRelease(TRITONSERVER_InferenceRequest*, uint32_t flags, void* user) {
    if ((flags & TRITONSERVER_REQUEST_RELEASE_ALL) == 0) return;
    auto* const task = static_cast<Task*>(user);
    const std::shared_ptr<Task> keep = std::move(task->held_by_request_);
    TRITONSERVER_InferenceRequest* made = nullptr;
    {
      const std::lock_guard<std::mutex> lock(task->mutex_);
      made = std::exchange(task->made_, nullptr);
    }
    Drop(TRITONSERVER_InferenceRequestDelete(made));
    // The inputs lie in these, and are freed as soon as Triton has released the request.
    task->message_ = {};
    task->elements_.clear();
  }

  static void OnResponse(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* user) {
    auto* const task = static_cast<Task*>(user);
    const bool is_final = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
    const std::shared_ptr<Task> keep = is_final ? std::move(task->held_by_responses_) : nullptr;
    // A backend may send responses from several threads.
    const std::lock_guard<std::mutex> lock(task->responses_mutex_);
    auto held = Hold(response);
    if (task->method_ == Method::kInfer) {
      task->Report(response, std::move(held), is_final);
    } else {
      task->ReportToStream(response, std::move(held), is_final);
    }
  }

  // Keeps a response, and so its model, until its message is sent: a server that ends waits for slow readers. Outputs
  // that were not taken over are freed with it.
  static std::shared_ptr<void> Hold(TRITONSERVER_InferenceResponse* response) {
    if (response == nullptr) return nullptr;
    return std::shared_ptr<void>(response, [](void* held) {
      Drop(TRITONSERVER_InferenceResponseDelete(static_cast<TRITONSERVER_InferenceResponse*>(held)));
    });
  }

  // The status is known when the last response has come, and the message is sent only if the status is good.
  void Report(TRITONSERVER_InferenceResponse* response, std::shared_ptr<void> held, bool is_final) {
    if (response != nullptr) {
      ++response_count_;
      Pieces pieces;
      Status status;
      if (response_count_ == 1 && Write(response, &pieces, &status)) {
        answer_ = MakeMessage(method_, std::move(pieces), "");
        answer_.back().held = std::move(held);
      } else if (response_count_ == 1) {
        failure_ = std::move(status);
      }
    }
    if (!is_final) return;
    if (response_count_ != 1) {
      failure_ = {Code::kInternal, "expected a single response, got " + std::to_string(response_count_)};
    }
    if (failure_.code == Code::kOk) responses_->OnMessage(std::move(answer_));
    responses_->OnEnd(failure_);
  }

  void ReportToStream(TRITONSERVER_InferenceResponse* response, std::shared_ptr<void> held, bool is_final) {
    if (has_stopped_) return;
    Pieces pieces;
    Status status;
    const bool is_good = response != nullptr && Write(response, &pieces, &status);
    if (response != nullptr && !is_good && outcome_ == guard::Outcome::kUnknown) outcome_ = OutcomeOf(status);
    if (response != nullptr && !is_good && request_.stops_at_error) {
      has_stopped_ = true;
      responses_->OnEnd(status);
      return Cancel();
    }
    if (response != nullptr || (is_final && wants_empty_final_)) {
      if (!is_good) {
        pieces = {};
        WriteRequest(&pieces.text());
      }
      WriteBoolParameter(&pieces.text(), "triton_final_response", is_final);
      Message message = MakeMessage(method_, std::move(pieces), status.text);
      message.back().held = std::move(held);
      responses_->OnMessage(std::move(message));
    }
    if (is_final) responses_->OnEnd({Code::kOk, "", outcome_});
  }

  // Writes the fields by which the caller of a stream knows which request a message is about.
  void WriteRequest(std::string* out) {
    WriteBytes(out, 3, request_.id);
    WriteBytes(out, 1, request_.model);
    if (!request_.version.empty()) WriteBytes(out, 2, request_.version);
  }

  // Writes a response. Returns false with the status if it is an error or cannot be written.
  bool Write(TRITONSERVER_InferenceResponse* response, Pieces* pieces, Status* status) {
    if (Take(TRITONSERVER_InferenceResponseError(response), status)) return false;
    const char* model = nullptr;
    const char* id = nullptr;
    int64_t version = 0;
    uint32_t count = 0;
    if (Take(TRITONSERVER_InferenceResponseModel(response, &model, &version), status) ||
        Take(TRITONSERVER_InferenceResponseId(response, &id), status) ||
        Take(TRITONSERVER_InferenceResponseParameterCount(response, &count), status)) {
      return false;
    }
    WriteBytes(&pieces->text(), 1, model);
    WriteBytes(&pieces->text(), 2, std::to_string(version));
    if (id[0] != '\0') WriteBytes(&pieces->text(), 3, id);
    for (uint32_t i = 0; i < count; ++i) {
      if (!WriteParameterOf(response, i, &pieces->text(), status)) return false;
    }
    if (Take(TRITONSERVER_InferenceResponseOutputCount(response, &count), status)) return false;
    std::vector<std::pair<OutputMemory*, size_t>> outputs;
    for (uint32_t i = 0; i < count; ++i) {
      if (!WriteOutput(response, i, &pieces->text(), &outputs, status)) return false;
    }
    for (const auto& [memory, size] : outputs) {
      WriteTag(&pieces->text(), 6, kBytes);
      WriteVarint(&pieces->text(), size);
      if (size <= kSmallOutput) {
        if (size > 0) pieces->text().append(memory->data.get(), size);
      } else {
        pieces->AddRaw(std::move(memory->data), size);
      }
    }
    if (pieces->size() > INT32_MAX) {
      *status = {Code::kInvalidArgument, "Response has byte size " + std::to_string(pieces->size()) +
                                             " which exceeds gRPC's byte size limit " + std::to_string(INT32_MAX) + "."};
      return false;
    }
    return true;
  }

  static bool WriteParameterOf(TRITONSERVER_InferenceResponse* response, uint32_t index, std::string* out,
                               Status* status) {
    const char* name = nullptr;
    TRITONSERVER_ParameterType type{};
    const void* value = nullptr;
    if (Take(TRITONSERVER_InferenceResponseParameter(response, index, &name, &type, &value), status)) return false;
    std::string written;
    switch (type) {
      case TRITONSERVER_PARAMETER_BOOL:
        WriteTag(&written, 1, kVarint);
        WriteVarint(&written, *static_cast<const bool*>(value) ? 1 : 0);
        break;
      case TRITONSERVER_PARAMETER_INT:
        WriteTag(&written, 2, kVarint);
        WriteVarint(&written, static_cast<uint64_t>(*static_cast<const int64_t*>(value)));
        break;
      case TRITONSERVER_PARAMETER_STRING:
        WriteText(&written, 3, static_cast<const char*>(value));
        break;
      case TRITONSERVER_PARAMETER_DOUBLE:
        WriteTag(&written, 4, kFixed64);
        written.append(static_cast<const char*>(value), sizeof(double));
        break;
      default:
        *status = {Code::kUnimplemented,
                   "Response parameter of type 'TRITONSERVER_PARAMETER_BYTES' is not currently supported"};
        return false;
    }
    WriteParameter(out, name, written);
    return true;
  }

  static bool WriteOutput(TRITONSERVER_InferenceResponse* response, uint32_t index, std::string* out,
                          std::vector<std::pair<OutputMemory*, size_t>>* outputs, Status* status) {
    const char* name = nullptr;
    TRITONSERVER_DataType type{};
    const int64_t* shape = nullptr;
    uint64_t dims = 0;
    const void* base = nullptr;
    size_t size = 0;
    TRITONSERVER_MemoryType memory_type{};
    int64_t memory_id = 0;
    void* user = nullptr;
    if (Take(TRITONSERVER_InferenceResponseOutput(response, index, &name, &type, &shape, &dims, &base, &size,
                                                  &memory_type, &memory_id, &user),
             status)) {
      return false;
    }
    auto* const memory = static_cast<OutputMemory*>(user);
    uint64_t expected = TRITONSERVER_DataTypeByteSize(type);
    bool is_wrong = size > 0 && memory == nullptr;
    for (uint64_t i = 0; i < dims && type != TRITONSERVER_TYPE_BYTES; ++i) {
      is_wrong = is_wrong || shape[i] < 0 || __builtin_mul_overflow(expected, static_cast<uint64_t>(shape[i]), &expected);
    }
    std::string dimensions;
    for (uint64_t i = 0; i < dims; ++i) WriteVarint(&dimensions, static_cast<uint64_t>(shape[i]));
    if (is_wrong || (type != TRITONSERVER_TYPE_BYTES && expected != size)) {
      const std::string wanted = is_wrong ? "a shape that can be counted" : std::to_string(expected) + " bytes";
      *status = {Code::kInternal, "output '" + std::string(name) + "' of the model: expected " + wanted +
                                      " for its shape and its data type " + TRITONSERVER_DataTypeString(type) + ", got " +
                                      std::to_string(size) + " bytes"};
      return false;
    }
    std::string written;
    WriteText(&written, 1, name);
    WriteBytes(&written, 2, TRITONSERVER_DataTypeString(type));
    if (dims > 0) WriteBytes(&written, 3, dimensions);
    WriteBytes(out, 5, written);
    outputs->emplace_back(memory, size);
    return true;
  }

  const Method method_;
  const Request request_;
  Chunk message_;
  std::vector<std::unique_ptr<char[]>> elements_;  // the elements of inputs that are not raw
  const std::shared_ptr<Responses> responses_;
  bool wants_empty_final_ = false;
  std::shared_ptr<Task> held_by_request_;
  std::shared_ptr<Task> held_by_responses_;

  std::mutex responses_mutex_;  // guards what follows
  uint64_t response_count_ = 0;
  Message answer_;
  Status failure_;
  bool has_stopped_ = false;
  guard::Outcome outcome_ = guard::Outcome::kUnknown;  // the outcome of the first error of a stream

  std::mutex mutex_;  // guards what follows
  TRITONSERVER_InferenceRequest* made_ = nullptr;
  bool is_submitted_ = false;
  bool is_cancelled_ = false;
};

}  // namespace

guard::Outcome OutcomeOf(const Status& status) {
  if (status.outcome != guard::Outcome::kUnknown) return status.outcome;
  return status.code == Code::kOk ? guard::Outcome::kOk : guard::OutcomeOfError(CodeOfTriton(status.code), status.text);
}

bool IsDecoupled(TRITONSERVER_Server* server, const Request& request) {
  uint32_t policy = 0;
  Status ignored;
  return !Take(TRITONSERVER_ServerModelTransactionProperties(server, request.model.c_str(), request.version_number,
                                                             &policy, nullptr),
               &ignored) &&
         (policy & TRITONSERVER_TXN_DECOUPLED) != 0;
}

std::shared_ptr<Running> Start(TRITONSERVER_Server* server, Method method, Request request, Chunk message,
                               std::shared_ptr<Responses> responses) {
  auto task = std::make_shared<Task>(method, std::move(request), std::move(message), std::move(responses));
  task->Submit(server);
  return task;
}

}  // namespace pytriton::grpc
