// Inference over gRPC, without a network, against a double of Triton that answers with what it was asked, counts what it
// gives away, and fails wherever Triton may. The first argument says what is done:
//
//   read                    prints what is read in the messages of the standard input
//   serve                   answers them: `infer` or `stream`, and the message, each in hexadecimal digits
//   failures                every function of Triton fails in turn: nothing is left, and each request ends once
//   threads COUNT           answers come in other threads while requests are cancelled
//   fuzz SECONDS SEED FILE  messages like those of the file, and changed ones
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../grpc/inference.h"
#include "../grpc/protobuf.h"
#include "../proxy/triton/triton_api.h"
#include "check.h"
#include "triton_failures.h"

// ---- Triton ----------------------------------------------------------------------------------------------------------

using Query = TRITONSERVER_Error* (*)(TRITONSERVER_ResponseAllocator*, void*, const char*, size_t*, TRITONSERVER_MemoryType*,
                                      int64_t*);

struct TRITONSERVER_ResponseAllocator {
  TRITONSERVER_ResponseAllocatorAllocFn_t make;
  TRITONSERVER_ResponseAllocatorReleaseFn_t free;
  Query query;
};

struct Value {
  std::string name;
  TRITONSERVER_ParameterType type;
  bool truth = false;
  int64_t integer = 0;
  double number = 0;
  std::string text;
};

struct Tensor {
  std::string name;
  TRITONSERVER_DataType datatype{};
  std::vector<int64_t> shape;
  const void* data = nullptr;
  size_t size = 0;
};

struct TRITONSERVER_InferenceRequest {
  std::string model, id;
  std::vector<Value> values;
  std::vector<Tensor> inputs;
  std::set<std::string> outputs;
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  TRITONSERVER_InferenceRequestReleaseFn_t released = nullptr;
  void* released_userp = nullptr;
  TRITONSERVER_InferenceResponseCompleteFn_t completed = nullptr;
  void* completed_userp = nullptr;
  std::atomic<bool> is_submitted{false};
  std::atomic<bool> is_cancelled{false};
};

struct Output {
  Tensor tensor;
  void* data = nullptr;
  void* userp = nullptr;
};

struct TRITONSERVER_InferenceResponse {
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  std::string model, id;
  std::vector<Value> values;
  std::vector<Output> outputs;
  TRITONSERVER_Error_Code code = TRITONSERVER_ERROR_INTERNAL;
  std::string error;
  bool failed = false;
};

namespace {

constexpr uint32_t kFinal = TRITONSERVER_RESPONSE_COMPLETE_FINAL;
constexpr uint32_t kDecoupled = TRITONSERVER_TXN_DECOUPLED;
constexpr uint32_t kOneToOne = 1;

std::atomic<int64_t> responses{0}, buffers{0}, cancels{0};
std::mutex requests_mutex;
std::set<TRITONSERVER_InferenceRequest*> requests;

bool releases_first = false;

constexpr struct {
  const char* name;
  uint32_t size;
} kTypes[] = {{"INVALID", 0}, {"BOOL", 1},  {"UINT8", 1}, {"UINT16", 2}, {"UINT32", 4}, {"UINT64", 8}, {"INT8", 1}, {"INT16", 2},
              {"INT32", 4},   {"INT64", 8}, {"FP16", 2},  {"FP32", 4},   {"FP64", 8},   {"BYTES", 0},  {"BF16", 2}};

// Where requests are answered in another thread.
class Queue {
 public:
  void Start(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  void Stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  bool is_running() const { return !threads_.empty(); }
  void Add(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return stops_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stops_ = false;
} queue;

const Value* Find(const TRITONSERVER_InferenceRequest& request, const std::string& name) {
  for (const Value& value : request.values) {
    if (value.name == name) return &value;
  }
  return nullptr;
}

// The answer to a request: its inputs as outputs, and its parameters. Memory as a backend asks for it.
TRITONSERVER_InferenceResponse* Answer(const TRITONSERVER_InferenceRequest& request) {
  auto* const response = new TRITONSERVER_InferenceResponse;
  ++responses;
  response->allocator = request.allocator;
  response->model = request.model;
  response->id = request.id;
  response->values = request.values;
  if (request.model == "error" || request.is_cancelled) {
    response->failed = true;
    response->code = request.is_cancelled ? TRITONSERVER_ERROR_CANCELLED : TRITONSERVER_ERROR_INVALID_ARG;
    response->error = request.is_cancelled ? "Request cancelled" : request.id;
    return response;
  }
  for (const Tensor& input : request.inputs) {
    if (!request.outputs.empty() && request.outputs.count(input.name) == 0) continue;
    Output output{input};
    if (request.model == "wrong") output.tensor.size += 1;
    TRITONSERVER_MemoryType type{};
    int64_t device = -1;
    CHECK(request.allocator->query(request.allocator, nullptr, input.name.c_str(), nullptr, &type, &device) == nullptr);
    CHECK(type == TRITONSERVER_MEMORY_CPU && device == 0);
    CHECK(request.allocator->make(request.allocator, input.name.c_str(), output.tensor.size, TRITONSERVER_MEMORY_GPU, 3, nullptr,
                                  &output.data, &output.userp, &type, &device) == nullptr);
    CHECK(type == TRITONSERVER_MEMORY_CPU && device == 0);
    ++buffers;
    if (output.tensor.size > 0) std::memset(output.data, '?', output.tensor.size);
    if (input.size > 0) std::memcpy(output.data, input.data, input.size);
    response->outputs.push_back(output);
  }
  return response;
}

void Execute(TRITONSERVER_InferenceRequest* request) {
  const auto released = request->released;
  void* const released_userp = request->released_userp;
  const auto completed = request->completed;
  void* const completed_userp = request->completed_userp;
  const std::string model = request->model;
  const Value* const asked = Find(*request, "responses");
  const Value* const apart = Find(*request, "apart");
  std::vector<TRITONSERVER_InferenceResponse*> answers;
  const int64_t count = model == "never" ? 0 : model == "twice" ? 2 : model == "stream" && asked != nullptr ? asked->integer : 1;
  for (int64_t i = 0; i < count; ++i) answers.push_back(Answer(*request));
  const bool is_apart = model == "apart" || answers.empty() || (apart != nullptr && apart->truth);
  // Triton asks first whether a request is to be queued again.
  released(request, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, released_userp);
  if (releases_first) released(request, TRITONSERVER_REQUEST_RELEASE_ALL, released_userp);
  for (size_t i = 0; i < answers.size(); ++i) {
    completed(answers[i], !is_apart && i + 1 == answers.size() ? kFinal : 0, completed_userp);
  }
  if (is_apart) completed(nullptr, kFinal, completed_userp);
  if (!releases_first) released(request, TRITONSERVER_REQUEST_RELEASE_ALL, released_userp);
}

}  // namespace

extern "C" {

const char* TRITONSERVER_DataTypeString(TRITONSERVER_DataType type) { return kTypes[type].name; }
uint32_t TRITONSERVER_DataTypeByteSize(TRITONSERVER_DataType type) { return kTypes[type].size; }
TRITONSERVER_DataType TRITONSERVER_StringToDataType(const char* name) {
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    if (kTypes[i].name == std::string_view(name)) return static_cast<TRITONSERVER_DataType>(i);
  }
  return TRITONSERVER_TYPE_INVALID;
}

TRITONSERVER_Error* TRITONSERVER_ServerModelTransactionProperties(
    TRITONSERVER_Server*, const char* model, const int64_t, uint32_t* flags, void**) {
  MAY_FAIL;
  if (std::strcmp(model, "none") == 0) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_NOT_FOUND, "no such model");
  *flags = std::strcmp(model, "stream") == 0 ? kDecoupled : kOneToOne;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorNew(
    TRITONSERVER_ResponseAllocator** allocator, TRITONSERVER_ResponseAllocatorAllocFn_t make,
    TRITONSERVER_ResponseAllocatorReleaseFn_t free, TRITONSERVER_ResponseAllocatorStartFn_t) {
  static TRITONSERVER_ResponseAllocator made;
  made = {make, free, nullptr};
  *allocator = &made;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorSetQueryFunction(TRITONSERVER_ResponseAllocator* allocator, Query query) {
  allocator->query = query;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestNew(
    TRITONSERVER_InferenceRequest** request, TRITONSERVER_Server*, const char* model, int64_t) {
  MAY_FAIL;
  if (std::strcmp(model, "none") == 0) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_NOT_FOUND, "no such model");
  *request = new TRITONSERVER_InferenceRequest;
  (*request)->model = model;
  const std::lock_guard<std::mutex> lock(requests_mutex);
  requests.insert(*request);
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest* request) {
  {
    const std::lock_guard<std::mutex> lock(requests_mutex);
    CHECK(requests.erase(request) == 1);
  }
  delete request;
  return Fails(__func__);
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestCancel(TRITONSERVER_InferenceRequest* request) {
  {
    const std::lock_guard<std::mutex> lock(requests_mutex);
    CHECK(requests.count(request) == 1);
    CHECK(request->is_submitted);
    CHECK(!request->is_cancelled);
    request->is_cancelled = true;
  }
  ++cancels;
  return Fails(__func__);
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetId(TRITONSERVER_InferenceRequest* request, const char* id) {
  MAY_FAIL;
  request->id = id;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetStringParameter(
    TRITONSERVER_InferenceRequest* request, const char* name, const char* value) {
  MAY_FAIL;
  request->values.push_back({name, TRITONSERVER_PARAMETER_STRING, false, 0, 0, value});
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetIntParameter(
    TRITONSERVER_InferenceRequest* request, const char* name, const int64_t value) {
  MAY_FAIL;
  request->values.push_back({name, TRITONSERVER_PARAMETER_INT, false, value, 0, ""});
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetBoolParameter(
    TRITONSERVER_InferenceRequest* request, const char* name, const bool value) {
  MAY_FAIL;
  request->values.push_back({name, TRITONSERVER_PARAMETER_BOOL, value, 0, 0, ""});
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetDoubleParameter(
    TRITONSERVER_InferenceRequest* request, const char* name, const double value) {
  MAY_FAIL;
  request->values.push_back({name, TRITONSERVER_PARAMETER_DOUBLE, false, 0, value, ""});
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetFlags(TRITONSERVER_InferenceRequest* request, uint32_t flags) {
  return TRITONSERVER_InferenceRequestSetIntParameter(request, "its flags", flags);
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetCorrelationId(TRITONSERVER_InferenceRequest* request, uint64_t id) {
  return TRITONSERVER_InferenceRequestSetIntParameter(request, "its correlation id", static_cast<int64_t>(id));
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetCorrelationIdString(TRITONSERVER_InferenceRequest* request, const char* id) {
  return TRITONSERVER_InferenceRequestSetStringParameter(request, "its correlation id", id);
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetPriorityUInt64(TRITONSERVER_InferenceRequest* request, uint64_t priority) {
  return TRITONSERVER_InferenceRequestSetIntParameter(request, "its priority", static_cast<int64_t>(priority));
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(
    TRITONSERVER_InferenceRequest* request, uint64_t timeout) {
  return TRITONSERVER_InferenceRequestSetIntParameter(request, "its timeout", static_cast<int64_t>(timeout));
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddInput(
    TRITONSERVER_InferenceRequest* request, const char* name, const TRITONSERVER_DataType type, const int64_t* shape,
    uint64_t dims) {
  MAY_FAIL;
  for (const Tensor& input : request->inputs) {
    if (input.name == name) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "twice");
  }
  request->inputs.push_back({name, type, {shape, shape + dims}});
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputData(
    TRITONSERVER_InferenceRequest* request, const char* name, const void* data, size_t size, TRITONSERVER_MemoryType, int64_t) {
  MAY_FAIL;
  for (Tensor& input : request->inputs) {
    if (input.name == name) {
      input.data = data;
      input.size = size;
    }
  }
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddRequestedOutput(TRITONSERVER_InferenceRequest* request, const char* name) {
  MAY_FAIL;
  request->outputs.insert(name);
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetReleaseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceRequestReleaseFn_t released, void* userp) {
  MAY_FAIL;
  request->released = released;
  request->released_userp = userp;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetResponseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_ResponseAllocator* allocator, void*,
    TRITONSERVER_InferenceResponseCompleteFn_t completed, void* userp) {
  MAY_FAIL;
  request->allocator = allocator;
  request->completed = completed;
  request->completed_userp = userp;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_ServerInferAsync(
    TRITONSERVER_Server*, TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceTrace*) {
  MAY_FAIL;
  request->is_submitted = true;
  if (queue.is_running()) {
    queue.Add([request] { Execute(request); });
  } else {
    Execute(request);
  }
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseError(TRITONSERVER_InferenceResponse* response) {
  MAY_FAIL;
  return response->failed ? TRITONSERVER_ErrorNew(response->code, response->error.c_str()) : nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseDelete(TRITONSERVER_InferenceResponse* response) {
  for (const Output& output : response->outputs) {
    --buffers;
    TRITONSERVER_Error* const error = response->allocator->free(
        response->allocator, output.data, output.userp, output.tensor.size, TRITONSERVER_MEMORY_CPU, 0);
    CHECK(error == nullptr);
  }
  --responses;
  delete response;
  return Fails(__func__);
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseModel(
    TRITONSERVER_InferenceResponse* response, const char** model, int64_t* version) {
  MAY_FAIL;
  *model = response->model.c_str();
  *version = 7;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseId(TRITONSERVER_InferenceResponse* response, const char** id) {
  MAY_FAIL;
  *id = response->id.c_str();
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseParameterCount(TRITONSERVER_InferenceResponse* response, uint32_t* count) {
  MAY_FAIL;
  *count = static_cast<uint32_t>(response->values.size());
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseParameter(
    TRITONSERVER_InferenceResponse* response, const uint32_t index, const char** name, TRITONSERVER_ParameterType* type,
    const void** value) {
  MAY_FAIL;
  const Value& of = response->values.at(index);
  *name = of.name.c_str();
  *type = of.type;
  *value = of.type == TRITONSERVER_PARAMETER_BOOL     ? static_cast<const void*>(&of.truth)
           : of.type == TRITONSERVER_PARAMETER_INT    ? static_cast<const void*>(&of.integer)
           : of.type == TRITONSERVER_PARAMETER_DOUBLE ? static_cast<const void*>(&of.number)
                                                      : of.text.c_str();
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutputCount(TRITONSERVER_InferenceResponse* response, uint32_t* count) {
  MAY_FAIL;
  *count = static_cast<uint32_t>(response->outputs.size());
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutput(
    TRITONSERVER_InferenceResponse* response, const uint32_t index, const char** name, TRITONSERVER_DataType* type,
    const int64_t** shape, uint64_t* dims, const void** base, size_t* size, TRITONSERVER_MemoryType* memory, int64_t* device,
    void** userp) {
  MAY_FAIL;
  const Output& output = response->outputs.at(index);
  *name = output.tensor.name.c_str();
  *type = output.tensor.datatype;
  *shape = output.tensor.shape.data();
  *dims = output.tensor.shape.size();
  *base = output.data;
  *size = output.tensor.size;
  *memory = TRITONSERVER_MEMORY_CPU;
  *device = 0;
  *userp = output.userp;
  return nullptr;
}

}  // extern "C"

// ---- what is tried ---------------------------------------------------------------------------------------------------

namespace {

using namespace pytriton::grpc;

TRITONSERVER_Server* const kServer = reinterpret_cast<TRITONSERVER_Server*>(1);

std::string ToHex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[byte & 15];
  }
  return text.empty() ? "-" : text;
}

std::string FromHex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

// A copy of its own, so that whoever reads past its end is found out.
Chunk ToChunk(const std::string& message) {
  Chunk chunk{std::unique_ptr<char[]>(new char[message.size()]), message.size()};
  std::memcpy(chunk.data.get(), message.data(), message.size());
  return chunk;
}

class Collected : public Responses {
 public:
  void OnMessage(Message message) override {
    const std::lock_guard<std::mutex> lock(mutex);
    CHECK(ends == 0);
    std::string bytes;
    for (const Chunk& chunk : message) bytes.append(chunk.data.get(), chunk.size);
    messages.push_back(std::move(bytes));
    if (on_message) on_message();
  }
  void OnEnd(Status with) override {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      CHECK(ends++ == 0);
      status = std::move(with);
    }
    ended.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    ended.wait(lock, [this] { return ends > 0; });
  }

  std::mutex mutex;
  std::condition_variable ended;
  std::vector<std::string> messages;
  Status status;
  int ends = 0;
  std::function<void()> on_message;
};

void CheckNothingIsLeft() {
  CHECK(errors == 0);
  CHECK(responses == 0);
  CHECK(buffers == 0);
  const std::lock_guard<std::mutex> lock(requests_mutex);
  CHECK(requests.empty());
}

// Hands a message to Triton, unless it cannot be read. Null where Triton's own front end is to have it.
std::shared_ptr<Collected> Serve(Method method, const std::string& message, bool stops_at_error = false,
                                 std::shared_ptr<Running>* running = nullptr) {
  auto collected = std::make_shared<Collected>();
  Chunk chunk = ToChunk(message);
  Request request;
  const Status status = Read(chunk.data.get(), chunk.size, &request);
  if (status.code != Code::kOk) {
    collected->OnEnd(status);
    return collected;
  }
  if (request.is_for_triton) return nullptr;
  request.stops_at_error = stops_at_error;
  auto started = Start(kServer, method, std::move(request), std::move(chunk), collected);
  CHECK(started != nullptr);
  if (running != nullptr) *running = std::move(started);
  return collected;
}

void Print(const Parameter& parameter) {
  std::cout << "parameter " << ToHex(parameter.name) << ' ';
  switch (parameter.type) {
    case Parameter::Type::kBool:
      std::cout << "bool " << parameter.truth;
      break;
    case Parameter::Type::kInt:
      std::cout << "int " << parameter.integer;
      break;
    case Parameter::Type::kString:
      std::cout << "string " << ToHex(parameter.text);
      break;
    case Parameter::Type::kDouble:
      std::cout << "double " << ToHex({reinterpret_cast<const char*>(&parameter.number), sizeof(double)});
      break;
    case Parameter::Type::kUnsigned:
      std::cout << "unsigned " << parameter.whole;
      break;
  }
  std::cout << '\n';
}

void PrintRead() {
  std::string line;
  while (std::getline(std::cin, line)) {
    const Chunk chunk = ToChunk(FromHex(line));
    Request request;
    const Status status = Read(chunk.data.get(), chunk.size, &request);
    std::cout << "status " << static_cast<int>(status.code) << ' ' << ToHex(status.text) << '\n';
    if (status.code != Code::kOk) continue;
    std::cout << "triton " << request.is_for_triton << "\nsequence " << request.is_in_sequence << "\nmodel "
              << ToHex(request.model) << "\nversion " << ToHex(request.version) << "\nid " << ToHex(request.id) << '\n';
    for (const Parameter& parameter : request.parameters) Print(parameter);
    for (const Input& input : request.inputs) {
      std::cout << "input " << ToHex(input.name) << ' ' << ToHex(input.datatype);
      for (const int64_t size : input.shape) std::cout << ' ' << size;
      std::cout << '\n';
      if (!input.has_elements || request.is_for_triton) continue;
      const std::unique_ptr<char[]> made(new char[input.elements_bytes]);
      CopyElements(input, made.get());
      std::cout << "elements " << ToHex({made.get(), input.elements_bytes}) << '\n';
    }
    for (const std::string& output : request.outputs) std::cout << "output " << ToHex(output) << '\n';
    for (const std::string_view raw : request.contents) std::cout << "raw " << ToHex(raw) << '\n';
  }
}

void PrintServed() {
  std::string kind, line;
  while (std::cin >> kind >> line) {
    const Method method = kind == "infer" ? Method::kInfer : Method::kStreamInfer;
    const auto collected = Serve(method, line == "-" ? "" : FromHex(line), kind == "strict");
    if (collected == nullptr) {
      std::cout << "triton\n";
      continue;
    }
    for (const std::string& message : collected->messages) std::cout << "message " << ToHex(message) << '\n';
    std::cout << "status " << static_cast<int>(collected->status.code) << ' ' << ToHex(collected->status.text) << '\n';
    CHECK(collected->ends == 1);
    CheckNothingIsLeft();
  }
}

// A request with every kind of parameter, of input and of content.
std::string MakeRequest(const std::string& model, bool is_raw, int64_t responses_asked = 1, bool is_apart = false) {
  std::string message;
  WriteBytes(&message, 1, model);
  WriteBytes(&message, 3, "an id");
  const auto parameter = [&message](std::string_view name, uint32_t field, WireType type, const std::string& text, uint64_t number) {
    std::string value, entry;
    if (type == kBytes) {
      WriteBytes(&value, field, text);
    } else {
      WriteTag(&value, field, type);
      if (type == kVarint) {
        WriteVarint(&value, number);
      } else {
        value.append(reinterpret_cast<const char*>(&number), sizeof(number));
      }
    }
    WriteBytes(&entry, 1, name);
    WriteBytes(&entry, 2, value);
    WriteBytes(&message, 4, entry);
  };
  parameter("sequence_id", 2, kVarint, "", 5);
  parameter("sequence_start", 1, kVarint, "", 1);
  parameter("sequence_end", 1, kVarint, "", 0);
  parameter("priority", 5, kVarint, "", 9);
  parameter("timeout", 2, kVarint, "", 1'000'000);
  parameter(kEmptyFinal, 1, kVarint, "", 1);
  parameter("responses", 2, kVarint, "", static_cast<uint64_t>(responses_asked));
  parameter("apart", 1, kVarint, "", is_apart);
  parameter("text", 3, kBytes, "a text", 0);
  parameter("number", 4, kFixed64, "", 0);
  std::vector<std::string> raws;
  for (const int64_t size : {1, 600}) {
    std::string input, contents, packed(static_cast<size_t>(size) * 4, 'x');
    WriteBytes(&input, 1, "x" + std::to_string(size));
    WriteBytes(&input, 2, "FP32");
    WriteTag(&input, 3, kVarint);
    WriteVarint(&input, static_cast<uint64_t>(size));
    WriteBytes(&contents, 6, packed);
    if (!is_raw) WriteBytes(&input, 5, contents);
    WriteBytes(&message, 5, input);
    raws.push_back(packed);
    std::string output;
    WriteBytes(&output, 1, "x" + std::to_string(size));
    WriteBytes(&message, 6, output);
  }
  for (const std::string& raw : raws) {
    if (is_raw) WriteBytes(&message, 7, raw);
  }
  return message;
}

void TryFailures() {
  std::set<std::string> failed;
  for (const bool first : {false, true}) {
    releases_first = first;
    for (const Method method : {Method::kInfer, Method::kStreamInfer}) {
      for (const bool is_raw : {false, true}) {
        for (const std::string model : {"echo", "apart", "error", "stream", "none", "never", "twice", "wrong"}) {
          for (int64_t call = -1;; ++call) {
            failing_call = call;
            calls = 0;
            failed_function.clear();
            const auto collected = Serve(method, MakeRequest(model, is_raw, 3));
            CHECK(collected != nullptr && collected->ends == 1);
            CheckNothingIsLeft();
            if (method == Method::kInfer) CHECK(collected->messages.size() == (collected->status.code == Code::kOk ? 1 : 0));
            if (method == Method::kStreamInfer) {
              CHECK(collected->status.code == Code::kOk);
              CHECK(!collected->messages.empty() || model == "never");
            }
            const bool is_good = method == Method::kInfer && (model == "echo" || model == "apart");
            const bool cannot_matter = failed_function.empty() || failed_function.find("Delete") != std::string::npos;
            if (is_good) CHECK((collected->status.code == Code::kOk) == cannot_matter);
            if (is_good && !cannot_matter) CHECK(!collected->status.text.empty());
            if (call >= 0 && failed_function.empty()) break;
            failed.insert(failed_function);
          }
        }
      }
    }
  }
  CHECK(failed.size() > 20);
  failing_call = -1;
}

void TryThreads(int count) {
  constexpr int kThreads = 3;
  queue.Start(kThreads);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kThreads; ++caller) {
    callers.emplace_back([caller, count] {
      std::mt19937 random(static_cast<unsigned>(caller));
      for (int i = 0; i < count; ++i) {
        const bool is_stream = random() % 2 == 0;
        const std::string message = MakeRequest(is_stream ? "stream" : random() % 2 == 0 ? "echo" : "apart", random() % 2 == 0,
                                                random() % 4, random() % 2 == 0);
        auto collected = std::make_shared<Collected>();
        Chunk chunk = ToChunk(message);
        Request request;
        CHECK(Read(chunk.data.get(), chunk.size, &request).code == Code::kOk);
        const auto running = Start(kServer, is_stream ? Method::kStreamInfer : Method::kInfer, std::move(request),
                                   std::move(chunk), collected);
        const auto when = random() % 4;
        if (when == 0) running->Cancel();
        if (when == 1) std::thread([running] { running->Cancel(); }).detach();
        if (when == 2) std::this_thread::yield();
        collected->Wait();
        if (random() % 2 == 0) running->Cancel();  // also after the end
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  queue.Stop();
  CheckNothingIsLeft();
  CHECK(cancels > 0);
}

void TryCancel() {
  // Within the answer, where Triton is still in the call that took the request: it is remembered, and no more is done, as
  // the request has been released.
  for (const bool first : {false, true}) {
    releases_first = first;
    cancels = 0;
    std::shared_ptr<Running> running;
    const auto collected = Serve(Method::kStreamInfer, MakeRequest("stream", true, 3), false, &running);
    running->Cancel();
    CHECK(collected->ends == 1 && cancels == 0);
  }
  releases_first = false;
  // Of an error that ends the stream, the rest is not told.
  const auto collected = Serve(Method::kStreamInfer, MakeRequest("error", true), true);
  CHECK(collected->messages.empty() && collected->status.code == Code::kInvalidArgument && collected->status.text == "an id");
  CheckNothingIsLeft();
}

void Fuzz(double seconds, unsigned seed, const char* path) {
  std::vector<std::string> messages = {MakeRequest("echo", true), MakeRequest("echo", false), MakeRequest("stream", false, 2)};
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) messages.push_back(FromHex(line));
  std::mt19937 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t count = 0, served = 0;
  while (std::chrono::steady_clock::now() < end) {
    std::string message = messages[random() % messages.size()];
    for (unsigned i = random() % 4; i > 0 && !message.empty(); --i) {
      const size_t place = random() % message.size();
      switch (random() % 5) {
        case 0:
          message[place] = static_cast<char>(random());
          break;
        case 1:
          message.resize(place);
          break;
        case 2:
          message.erase(place, random() % 8);
          break;
        case 3:
          message.insert(place, random() % 12, static_cast<char>(random()));
          break;
        default:
          message.insert(place, message.substr(random() % message.size(), random() % 64));
      }
    }
    const auto collected = Serve(random() % 2 == 0 ? Method::kInfer : Method::kStreamInfer, message);
    if (collected != nullptr) {
      CHECK(collected->ends == 1);
      served += collected->messages.empty() ? 0 : 1;
    }
    CheckNothingIsLeft();
    ++count;
  }
  std::cout << count << " messages, " << served << " of them answered\n";
  CHECK(count > 0 && served > 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "read") {
    PrintRead();
  } else if (name == "serve") {
    PrintServed();
  } else if (name == "failures") {
    TryFailures();
    TryCancel();
  } else if (name == "threads" && argc > 2) {
    TryThreads(std::atoi(argv[2]));
  } else if (name == "fuzz" && argc > 4) {
    Fuzz(std::atof(argv[2]), static_cast<unsigned>(std::atoi(argv[3])), argv[4]);
  } else {
    return 2;
  }
  return 0;
}
