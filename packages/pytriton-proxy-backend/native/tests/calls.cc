// Calls into a double of Triton, which answers in threads of its own, in any order and form that Triton may.
// `calls load CALLERS CALLS`: for the thread sanitizer; callers leave, break off and cancel.
// `calls ready THREADS CHECKS`: workers that say whether their model is ready.
// `calls types ROUNDS SEED`: inputs and outputs of every data type, metrics, traces; for the address sanitizer.
// `calls fuzz SECONDS SEED FOLDER`: mutated messages and records; FOLDER holds the golden vectors.
// Nothing may be left of any: nothing that Triton has made for us, no descriptor, and the endpoint goes on. The double owns
// and gives away what Triton does, as the table in triton_api.h says.
#include <dirent.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define PYTRITON_DOUBLE_HAS_ERRORS
#include "../proxy/calls/calls.h"
#include "../proxy/wire/arena.h"
#include "check.h"
#include "messages.h"
#include "triton_double.h"
#include "triton_errors.h"

using Random = std::mt19937_64;

// ---- Triton ----------------------------------------------------------------------------------------------------------

// A tensor of a request or of a response.
struct Values {
  std::string name;
  TRITONSERVER_DataType dtype = TRITONSERVER_TYPE_INVALID;
  std::vector<int64_t> dims;
  const void* data = nullptr;
  size_t size = 0;
  std::string seen;  // the bytes, as they were when the request came

  std::string Bytes() const { return size == 0 ? "" : std::string(static_cast<const char*>(data), size); }
};

struct TRITONSERVER_InferenceResponse {
  TRITONSERVER_ResponseAllocatorReleaseFn_t free_output = nullptr;
  bool failed = false;
  std::string error;  // of which whoever asks gets a new one each time
  std::vector<Values> outputs;
};

struct TRITONSERVER_Parameter {};
struct TRITONSERVER_MetricFamily {};
struct TRITONSERVER_Metric {};
struct TRITONSERVER_MetricArgs {};
struct TRITONSERVER_InferenceTrace {};

struct TRITONSERVER_ResponseAllocator {
  TRITONSERVER_ResponseAllocatorAllocFn_t make;
  TRITONSERVER_ResponseAllocatorReleaseFn_t free;
};

struct TRITONSERVER_InferenceRequest {
  std::string model;
  std::vector<Values> inputs;
  TRITONSERVER_InferenceTrace* trace = nullptr;
  std::atomic<bool> cancelled{false};
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  TRITONSERVER_InferenceRequestReleaseFn_t released = nullptr;
  void* released_userp = nullptr;
  TRITONSERVER_InferenceResponseCompleteFn_t completed = nullptr;
  void* completed_userp = nullptr;
};

namespace {

// What Triton has made and nobody has deleted, and the traces of requests that were found wrong, which stay for ever.
std::atomic<int64_t> requests{0}, responses{0}, parameters{0}, families{0}, metrics{0}, arguments{0}, traces{0};
std::vector<TRITONSERVER_InferenceTrace*> lost_traces;
std::atomic<int64_t> cancelled{0};
std::atomic<uint64_t> loads{0};
// Whether workers leave the memory of a request alone until they are told that it is theirs again.
bool inputs_stay = false;

bool NothingIsLeft() {
  return errors == 0 && requests == 0 && responses == 0 && parameters == 0 && families == 0 && metrics == 0 &&
         arguments == 0 && traces == static_cast<int64_t>(lost_traces.size());
}

// The threads in which Triton answers.
class Executor {
 public:
  Executor() {
    for (int i = 0; i < 3; ++i) threads_.emplace_back([this, i] { Run(i); });
  }
  ~Executor() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  void Add(TRITONSERVER_InferenceRequest* request) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(request);
    }
    changed_.notify_one();
  }

 private:
  void Run(int seed) {
    Random random(seed);
    for (;;) {
      TRITONSERVER_InferenceRequest* request;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        request = queue_.front();
        queue_.pop_front();
      }
      Answer(request, random);
    }
  }

  // Answers with the inputs; of some models with outputs of another size than that of their shape.
  static void Respond(TRITONSERVER_InferenceRequest* request, bool fails, uint32_t flags) {
    auto* response = new TRITONSERVER_InferenceResponse;
    ++responses;
    size_t total = 0;
    for (const Values& input : request->inputs) total += input.size;
    response->failed = fails;
    if (fails) {
      // One has no text at all, one is longer than a packet.
      response->error = std::string(total % 3 == 0 ? 0 : total % 3 == 1 ? 20 : 6000, 'e');
    }
    for (size_t i = 0; !fails && i < request->inputs.size(); ++i) {
      Values output = request->inputs[i];
      const std::string bytes = output.Bytes();
      if (request->model == "longer") output.size += 1;
      if (request->model == "shorter" && output.size != 0) output.size -= 1;
      void* buffer = nullptr;
      TRITONSERVER_MemoryType memory;
      int64_t device;
      void* userp;
      CHECK(request->allocator->make(
                request->allocator, output.name.c_str(), output.size, TRITONSERVER_MEMORY_CPU, 0, nullptr, &buffer, &userp,
                &memory, &device) == nullptr);
      response->free_output = request->allocator->free;
      output.data = buffer;
      if (output.size > bytes.size()) std::memset(buffer, 0, output.size);
      if (const size_t copied = std::min(bytes.size(), output.size); copied != 0) std::memcpy(buffer, bytes.data(), copied);
      response->outputs.push_back(output);
    }
    request->completed(response, flags, request->completed_userp);
  }

  static void Release(TRITONSERVER_InferenceRequest* request) {
    for (const Values& input : request->inputs) CHECK(!inputs_stay || input.Bytes() == input.seen);
    TRITONSERVER_InferenceTraceDelete(request->trace);
    request->released(request, 1, request->released_userp);
  }

  static void Answer(TRITONSERVER_InferenceRequest* request, Random& random) {
    const bool early = random() % 2 == 0;
    const auto completed = request->completed;
    void* userp = request->completed_userp;
    if (request->cancelled) ++cancelled;
    if (request->model == "stream") {
      for (uint64_t i = 0, count = random() % 4; i < count; ++i) Respond(request, i == 2, 0);
      if (early) Release(request);
      completed(nullptr, TRITONSERVER_RESPONSE_COMPLETE_FINAL, userp);
      if (!early) {
        if (inputs_stay) usleep(random() % 200);
        Release(request);
      }
      return;
    }
    Respond(request, request->model == "error", TRITONSERVER_RESPONSE_COMPLETE_FINAL);
    Release(request);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TRITONSERVER_InferenceRequest*> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

Executor* executor = nullptr;

}  // namespace

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory*, const uint32_t) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_ModelServer(TRITONBACKEND_Model*, TRITONSERVER_Server** server) {
  *server = nullptr;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestTrace(TRITONBACKEND_Request*, TRITONSERVER_InferenceTrace** trace) {
  static TRITONSERVER_InferenceTrace of_the_request;
  *trace = &of_the_request;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceTraceSpawnChildTrace(
    TRITONSERVER_InferenceTrace*, TRITONSERVER_InferenceTrace** child) {
  ++traces;
  *child = new TRITONSERVER_InferenceTrace;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceTraceDelete(TRITONSERVER_InferenceTrace* trace) {
  if (trace != nullptr) --traces;
  delete trace;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_ServerModelIsReady(TRITONSERVER_Server*, const char* name, int64_t, bool* ready) {
  *ready = std::strcmp(name, "unready") != 0;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_ServerModelTransactionProperties(
    TRITONSERVER_Server*, const char* name, int64_t, uint32_t* flags, void**) {
  *flags = std::strcmp(name, "stream") == 0 ? uint32_t{TRITONSERVER_TXN_DECOUPLED} : 1u;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_ServerInferAsync(
    TRITONSERVER_Server*, TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceTrace* trace) {
  // Only a request that is right gets its trace; of one that is refused then it is let go.
  if (request->model == "refused") {
    if (trace != nullptr) lost_traces.push_back(trace);
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "");
  }
  if (request->model == "full") {
    TRITONSERVER_InferenceTraceDelete(trace);
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "the queue is full");
  }
  request->trace = trace;
  for (Values& input : request->inputs) input.seen = input.Bytes();
  executor->Add(request);
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_ServerLoadModelWithParameters(
    TRITONSERVER_Server*, const char*, const TRITONSERVER_Parameter**, uint64_t) {
  ++loads;
  usleep(1000);
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, std::string(5000, 'l').c_str());
}
TRITONSERVER_Error* TRITONSERVER_ServerUnloadModel(TRITONSERVER_Server*, const char*) { return nullptr; }
TRITONSERVER_Error* TRITONSERVER_ServerUnloadModelAndDependents(TRITONSERVER_Server*, const char*) { return nullptr; }
TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(const char*, TRITONSERVER_ParameterType, const void*) {
  ++parameters;
  return new TRITONSERVER_Parameter;
}
TRITONSERVER_Parameter* TRITONSERVER_ParameterBytesNew(const char*, const void*, uint64_t) {
  ++parameters;
  return new TRITONSERVER_Parameter;
}
void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter* parameter) {
  --parameters;
  delete parameter;
}

// Each of these makes one object, or deletes one. A metric or a family of the wrong kind is refused.
#define MAKER(name, type, count, wrong, ...)                                                              \
  TRITONSERVER_Error* TRITONSERVER_##name(TRITONSERVER_##type** made, __VA_ARGS__) {                      \
    if (wrong) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "wrong");                      \
    ++count;                                                                                               \
    *made = new TRITONSERVER_##type;                                                                       \
    return nullptr;                                                                                        \
  }
#define DELETER(type, count)                                                      \
  TRITONSERVER_Error* TRITONSERVER_##type##Delete(TRITONSERVER_##type* object) {  \
    --count;                                                                      \
    delete object;                                                                \
    return nullptr;                                                               \
  }
MAKER(MetricFamilyNew, MetricFamily, families, std::strcmp(name, "wrong") == 0, const TRITONSERVER_MetricKind,
      const char* name, const char*)
MAKER(MetricNew, Metric, metrics, count == 3, TRITONSERVER_MetricFamily*, const TRITONSERVER_Parameter**,
      const uint64_t count)
MAKER(MetricNewWithArgs, Metric, metrics, count == 3, TRITONSERVER_MetricFamily*, const TRITONSERVER_Parameter**,
      const uint64_t count, const TRITONSERVER_MetricArgs*)
TRITONSERVER_Error* TRITONSERVER_MetricArgsNew(TRITONSERVER_MetricArgs** made) {
  ++arguments;
  *made = new TRITONSERVER_MetricArgs;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_MetricArgsSetHistogram(TRITONSERVER_MetricArgs*, const double*, const uint64_t count) {
  return count == 0 ? TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "no buckets") : nullptr;
}
DELETER(MetricFamily, families)
DELETER(Metric, metrics)
DELETER(MetricArgs, arguments)

TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorNew(
    TRITONSERVER_ResponseAllocator** allocator, TRITONSERVER_ResponseAllocatorAllocFn_t make,
    TRITONSERVER_ResponseAllocatorReleaseFn_t free, TRITONSERVER_ResponseAllocatorStartFn_t) {
  static TRITONSERVER_ResponseAllocator made;
  made = {make, free};
  *allocator = &made;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_InferenceRequestNew(
    TRITONSERVER_InferenceRequest** request, TRITONSERVER_Server*, const char* model, int64_t) {
  ++requests;
  *request = new TRITONSERVER_InferenceRequest;
  (*request)->model = model;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest* request) {
  --requests;
  delete request;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestCancel(TRITONSERVER_InferenceRequest* request) {
  request->cancelled = true;
  return nullptr;
}
#define SETTER(name, ...) \
  TRITONSERVER_Error* TRITONSERVER_InferenceRequest##name(TRITONSERVER_InferenceRequest*, __VA_ARGS__) { return nullptr; }
SETTER(SetId, const char*)
SETTER(SetFlags, uint32_t)
SETTER(SetCorrelationId, uint64_t)
SETTER(SetCorrelationIdString, const char*)
SETTER(SetPriorityUInt64, uint64_t)
SETTER(SetTimeoutMicroseconds, uint64_t)
SETTER(SetStringParameter, const char*, const char*)
SETTER(SetIntParameter, const char*, int64_t)
SETTER(SetBoolParameter, const char*, bool)
SETTER(SetDoubleParameter, const char*, double)
SETTER(AddRequestedOutput, const char*)
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddInput(
    TRITONSERVER_InferenceRequest* request, const char* name, TRITONSERVER_DataType dtype, const int64_t* dims,
    uint64_t count) {
  if (std::strcmp(name, "wrong") == 0) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "no such input");
  Values& input = request->inputs.emplace_back();
  input.name = name;
  input.dtype = dtype;
  input.dims.assign(dims, dims + count);
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputData(
    TRITONSERVER_InferenceRequest* request, const char* name, const void* data, size_t size, TRITONSERVER_MemoryType,
    int64_t) {
  Values& input = request->inputs.back();
  CHECK(input.name == name);
  // As it is, until the request is released: Triton copies nothing.
  input.data = data;
  input.size = size;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetReleaseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceRequestReleaseFn_t released, void* userp) {
  request->released = released;
  request->released_userp = userp;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetResponseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_ResponseAllocator* allocator, void*,
    TRITONSERVER_InferenceResponseCompleteFn_t completed, void* userp) {
  request->allocator = allocator;
  request->completed = completed;
  request->completed_userp = userp;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseError(TRITONSERVER_InferenceResponse* response) {
  return response->failed ? TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, response->error.c_str()) : nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseDelete(TRITONSERVER_InferenceResponse* response) {
  --responses;
  for (const Values& output : response->outputs) {
    response->free_output(
        nullptr, const_cast<void*>(output.data), nullptr, output.size, TRITONSERVER_MEMORY_CPU, 0);
  }
  delete response;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseParameterCount(TRITONSERVER_InferenceResponse*, uint32_t* count) {
  *count = 0;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseParameter(
    TRITONSERVER_InferenceResponse*, uint32_t, const char**, TRITONSERVER_ParameterType*, const void**) {
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutputCount(
    TRITONSERVER_InferenceResponse* response, uint32_t* count) {
  *count = static_cast<uint32_t>(response->outputs.size());
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutput(
    TRITONSERVER_InferenceResponse* response, uint32_t index, const char** name, TRITONSERVER_DataType* dtype,
    const int64_t** shape, uint64_t* dims, const void** base, size_t* size, TRITONSERVER_MemoryType* memory,
    int64_t* device, void** userp) {
  const Values& output = response->outputs[index];
  *name = output.name.c_str();
  *dtype = output.dtype;
  *shape = output.dims.data();
  *dims = output.dims.size();
  *base = output.data;
  *size = output.size;
  *memory = TRITONSERVER_MEMORY_CPU;
  *device = 0;
  *userp = nullptr;
  return nullptr;
}

}  // extern "C"

namespace pytriton {

Batch::~Batch() {}
void Batch::Collect(BatchSource*) {}
bool Batch::CompleteRecord(const BatchSource&, const BatchLayout&, uint8_t*) { return true; }
void Batch::Respond(const ResponseRecord&) {}
void Batch::Fail(TRITONSERVER_Error_Code, const std::string&) {}
void Batch::StartAgain(uint64_t) {}
void Batch::LookAtPaces(uint64_t, int, uint64_t, const std::function<bool(uint32_t, bool)>&) {}

bool Batch::is_paused() const { return false; }

void Batch::EndStalled(uint64_t, uint64_t, const std::function<std::string()>&, const Tell&) {}

void Batch::PollCancelled(const Tell&) {}

}  // namespace pytriton

using namespace pytriton;

namespace {

// ---- a worker that calls ---------------------------------------------------------------------------------------------

constexpr uint64_t kArena = 1u << 20;

class Worker {
 public:
  explicit Worker(const std::string& path) : Worker(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size());
    CHECK(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    Greeting greeting{};
    std::memcpy(greeting.magic, kMagic, sizeof(kMagic));
    greeting.major = kMajor;
    greeting.capabilities = kCapabilities;
    Send(MessageType::kCaller, {}, std::string(reinterpret_cast<const char*>(&greeting), sizeof(greeting)));
    Message message{};
    CHECK(Receive(&message) && message.type == static_cast<uint16_t>(MessageType::kWelcome));
  }
  // One that has been greeted.
  explicit Worker(int fd) : fd_(fd) {
    arena_ = static_cast<int>(syscall(SYS_memfd_create, "test-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(arena_ >= 0 && ftruncate(arena_, kArena) == 0);
    CHECK(fcntl(arena_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    memory = static_cast<uint8_t*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED, arena_, 0));
    CHECK(memory != MAP_FAILED);
  }
  ~Worker() {
    close(fd_);
    close(arena_);
    munmap(memory, kArena);
  }

  void Announce() {
    Message segment{};
    segment.segment = 1;
    segment.length = kArena;
    Send(MessageType::kSegment, segment, "", arena_);
  }

  // False if the connection has ended.
  bool Send(MessageType type, Message message, const std::string& body, int fd = -1) {
    message.type = static_cast<uint16_t>(type);
    std::string error;
    for (;;) {
      const Sent sent = SendPacket(fd_, &message, body.data(), body.size(), fd, &error);
      if (sent != Sent::kNoRoom) return sent == Sent::kSent;
      pollfd wait{fd_, POLLOUT, 0};
      poll(&wait, 1, -1);
    }
  }
  bool SendRaw(const std::string& packet) { return send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL) >= 0; }

  bool Receive(Message* message) { return ReceiveMessage(fd_, message); }

  // The answer to the one call that is under way, with the text of an error, once its record is free again; maps what it
  // lies in.
  Message Answer(std::string* text) {
    Packet packet;
    Message answer{};
    bool is_answered = false, is_free = false;
    std::string error;
    while (!is_answered || !is_free) {
      pollfd wait{fd_, POLLIN, 0};
      poll(&wait, 1, -1);
      const Received received = ReceivePacket(fd_, &packet, &error);
      if (received == Received::kNothing) continue;
      CHECK(received == Received::kPacket);
      const auto type = static_cast<MessageType>(packet.message.type);
      if (type == MessageType::kSegment) {
        CHECK(responses.Add(packet.message.segment, packet.fd, packet.message.length, &error));
      } else if (type == MessageType::kSegmentClose) {
        responses.Remove(packet.message.segment);
      } else if (type == MessageType::kRelease) {
        is_free = true;
      } else {
        text->assign(reinterpret_cast<const char*>(packet.body), packet.body_length);
        answer = packet.message;
        is_answered = true;
        is_free = is_free || (answer.flags & kFlagInputReleased) != 0;
      }
    }
    return answer;
  }

  // Ends what comes here, so that whoever reads returns.
  void Shutdown() { shutdown(fd_, SHUT_RDWR); }

  uint8_t* memory;
  PeerArena responses{64 * kArena};

 private:
  const int fd_;
  int arena_ = -1;
};

std::string Body(const std::string& name, int64_t subject = -1) {
  const CallBody body{subject, 1.5, 0, 0, {}};
  return std::string(reinterpret_cast<const char*>(&body), sizeof(body)) + name;
}

// The place of the record of call `number`, with these inputs and text parameters, written there.
Message Write(
    Worker& worker, uint64_t number, uint64_t place, const std::vector<Values>& inputs,
    const std::vector<std::string>& texts = {}) {
  BatchSource source;
  RequestSource& request = source.requests.emplace_back();
  for (const Values& input : inputs) {
    source.tensors.push_back({input.name, static_cast<uint32_t>(input.dtype), kWholeBatch,
                              static_cast<uint32_t>(source.dims.size()), static_cast<uint32_t>(input.dims.size()),
                              static_cast<uint32_t>(source.pieces.size()), 1, input.seen.size()});
    source.dims.insert(source.dims.end(), input.dims.begin(), input.dims.end());
    source.pieces.push_back({input.seen.data(), input.seen.size()});
  }
  for (const std::string& text : texts) source.parameters.push_back({text, TRITONSERVER_PARAMETER_STRING, text, 0});
  request.parameter_count = static_cast<uint32_t>(texts.size());
  BatchLayout layout;
  std::string error;
  CHECK(LayoutBatch(source, &layout, &error));
  WriteBatch(source, layout, number, 0, worker.memory + place);
  Message message{};
  message.batch = number;
  message.segment = 1;
  message.offset = place;
  message.length = layout.record_length;
  message.index = static_cast<uint32_t>(Operation::kInfer);
  return message;
}

Message Write(Worker& worker, uint64_t number, uint64_t place, uint64_t size, const char* name) {
  Values input;
  input.name = name;
  input.dtype = static_cast<TRITONSERVER_DataType>(2);  // UINT8
  input.dims = {static_cast<int64_t>(size)};
  input.seen.assign(size, static_cast<char>(number));
  return Write(worker, number, place, {input});
}

constexpr uint64_t kSlot = 8192;
constexpr uint64_t kSlots = 32;

// One life of a worker: makes calls, a few at a time, reads the answers, and leaves or breaks off.
void Live(const std::string& path, int calls, uint64_t seed) {
  static const char* const kModels[] = {"echo", "echo", "stream", "error", "refused", "unready"};
  Random random(seed);
  Worker worker(path);
  worker.Announce();
  std::map<uint64_t, uint64_t> under_way;  // number -> slot
  std::vector<uint64_t> free;
  for (uint64_t slot = 0; slot < kSlots; ++slot) free.push_back(slot);
  std::map<uint64_t, uint64_t> lent;  // offset -> slot
  int made = 0;
  const int last = random() % 3 == 0 ? calls / 2 : calls;  // a third breaks off
  uint64_t number = 0;
  while (made < last || (last == calls && !under_way.empty())) {
    while (made < last && !free.empty() && under_way.size() < 8) {
      const uint64_t slot = free.back();
      free.pop_back();
      const char* model = kModels[random() % 6];
      ++number;
      Message call = Write(worker, number, slot * kSlot, random() % 5000, random() % 20 == 0 ? "wrong" : "x");
      if (std::strcmp(model, "stream") == 0) call.flags = kFlagStream;
      if (random() % 50 == 0) call.index = static_cast<uint32_t>(Operation::kLoadModel);
      lent[call.offset] = slot;
      under_way[number] = slot;
      CHECK(worker.Send(MessageType::kCall, call, Body(model)));
      ++made;
      if (random() % 4 == 0) {
        Message cancel{};
        cancel.batch = number;
        CHECK(worker.Send(MessageType::kCancel, cancel, ""));
      }
    }
    Message message{};
    CHECK(worker.Receive(&message));
    const auto give_back = [&](uint64_t offset) {
      const auto found = lent.find(offset);
      CHECK(found != lent.end());
      free.push_back(found->second);
      lent.erase(found);
    };
    switch (static_cast<MessageType>(message.type)) {
      case MessageType::kRelease:
        give_back(message.offset);
        continue;
      case MessageType::kResponse: {
        Message release{};
        release.segment = message.segment;
        release.offset = message.offset;
        CHECK(worker.Send(MessageType::kRelease, release, ""));
        break;
      }
      case MessageType::kFail:
      case MessageType::kResult:
        break;
      default:
        continue;
    }
    const auto call = under_way.find(message.batch);
    CHECK(call != under_way.end());
    if ((message.flags & kFlagInputReleased) != 0) give_back(call->second * kSlot);
    if ((message.flags & kFlagBatchDone) != 0) under_way.erase(call);
  }
}

// ---- every type ------------------------------------------------------------------------------------------------------

// Strings of sizes around those that are kept without memory of their own, with the length that is sent before each.
std::string Strings(Random& random, uint64_t count) {
  static const uint32_t kLengths[] = {0, 1, 3, 4, 7, 8, 10, 11, 12, 15, 16, 17, 18, 19, 22, 23, 24, 31, 32, 33, 100, 3000};
  std::string bytes;
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t length = kLengths[random() % std::size(kLengths)];
    bytes.append(reinterpret_cast<const char*>(&length), sizeof(length));
    for (uint32_t n = 0; n < length; ++n) bytes.push_back(static_cast<char>(random()));
  }
  return bytes;
}

std::vector<Values> RandomInputs(Random& random, int dtype) {
  static const std::vector<int64_t> kShapes[] = {{}, {1}, {1, 1}, {3}, {0}, {2, 0}, {2, 3}, {4, 1, 2}};
  std::vector<Values> inputs(1 + random() % 6);
  for (size_t i = 0; i < inputs.size(); ++i) {
    Values& input = inputs[i];
    input.name = "input_" + std::to_string(i);
    // The others are mostly of the same type.
    input.dtype = static_cast<TRITONSERVER_DataType>(i == 0 || random() % 3 != 0 ? dtype : 1 + random() % 14);
    input.dims = kShapes[random() % std::size(kShapes)];
    uint64_t elements = 1;
    for (const int64_t dim : input.dims) elements *= static_cast<uint64_t>(dim);
    if (input.dtype == TRITONSERVER_TYPE_BYTES) {
      input.seen = Strings(random, elements);
    } else {
      input.seen.resize(elements * FixedElementSize(input.dtype));
      for (char& byte : input.seen) byte = static_cast<char>(random());
    }
  }
  return inputs;
}

class Conversation {
 public:
  explicit Conversation(Worker& worker) : worker_(worker) { worker_.Announce(); }

  // Makes a call, and gives the answer, "" for the text where that is no error.
  Message Ask(
      Operation operation, const std::string& name, int64_t subject, const std::vector<Values>& inputs,
      const std::vector<std::string>& texts, std::string* text) {
    Message call = Write(worker_, ++number_, 0, inputs, texts);
    call.index = static_cast<uint32_t>(operation);
    const CallBody body{subject, 1.5, 1, 0, {}};
    CHECK(worker_.Send(MessageType::kCall, call, std::string(reinterpret_cast<const char*>(&body), sizeof(body)) + name));
    const Message answer = worker_.Answer(text);
    CHECK(answer.batch == number_);
    if (answer.type != static_cast<uint16_t>(MessageType::kFail)) text->clear();
    if (answer.type != static_cast<uint16_t>(MessageType::kResponse)) return answer;
    segment_ = worker_.responses.Find(answer.segment, answer.offset, answer.length, text);
    CHECK(segment_ != nullptr);
    CHECK(record_.Parse(segment_->data() + answer.offset, answer.length, answer.batch, 1, false, text));
    // An error that is too long for a packet.
    if ((record_.entries()[0].flags & kResponseError) != 0) *text = record_.ErrorText(record_.entries()[0]);
    return answer;
  }

  void Infer(const std::string& model, const std::vector<Values>& inputs, const std::string& expected_error) {
    std::string text;
    const Message answer = Ask(Operation::kInfer, model, -1, inputs, {}, &text);
    CHECK(text.empty() == expected_error.empty() && text.find(expected_error) != std::string::npos);
    for (size_t i = 0; text.empty() && i < inputs.size(); ++i) {
      const RecordTensor& tensor = record_.tensors().at(i);
      CHECK(tensor.name == inputs[i].name && tensor.dtype == static_cast<uint32_t>(inputs[i].dtype));
      CHECK(std::vector<int64_t>(tensor.dims, tensor.dims + tensor.dims_count) == inputs[i].dims);
      CHECK(std::string(reinterpret_cast<const char*>(tensor.payload), tensor.payload_length) == inputs[i].seen);
    }
    if (answer.type != static_cast<uint16_t>(MessageType::kResponse)) return;
    Message release{};
    release.segment = answer.segment;
    release.offset = answer.offset;
    CHECK(worker_.Send(MessageType::kRelease, release, ""));
  }

 private:
  Worker& worker_;
  uint64_t number_ = 0;
  ResponseRecord record_;  // of the last answer
  std::shared_ptr<Segment> segment_;
};

void CheckTypes(int rounds, uint64_t seed) {
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  // Only what `OfferCalls` has set is in it.
  TRITONSERVER_ResponseAllocatorNew(
      &allocator,
      [](TRITONSERVER_ResponseAllocator*, const char*, size_t size, TRITONSERVER_MemoryType, int64_t, void*, void** buffer,
         void**, TRITONSERVER_MemoryType*, int64_t*) -> TRITONSERVER_Error* {
        *buffer = size == 0 ? nullptr : malloc(size);
        return nullptr;
      },
      [](TRITONSERVER_ResponseAllocator*, void* buffer, void*, size_t, TRITONSERVER_MemoryType, int64_t) {
        free(buffer);
        return static_cast<TRITONSERVER_Error*>(nullptr);
      },
      nullptr);
  // Every call is made for a request that is traced.
  Calls calls(CallContext{nullptr, allocator, {"model", 1}, 64 * kArena, 10000, [](uint64_t, uint32_t, const auto& use) {
                            static int request;
                            use(reinterpret_cast<TRITONBACKEND_Request*>(&request));
                          }});
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
  calls.Serve(sockets[0], "a worker");
  Random random(seed);
  {
    Worker worker(sockets[1]);
    Conversation conversation(worker);
    std::string text;
    for (int round = 0; round < rounds; ++round) {
      for (int dtype = 1; dtype <= 14; ++dtype) {
        std::vector<Values> inputs = RandomInputs(random, dtype);
        conversation.Infer("echo", inputs, "");
        conversation.Infer("error", inputs, "e");
        conversation.Infer("full", inputs, "the queue is full");
        conversation.Infer("refused", inputs, "unknown error");
        conversation.Infer("longer", inputs, "expected");
        if (!inputs[0].seen.empty()) conversation.Infer("shorter", inputs, "expected");
        if (inputs.back().dtype != TRITONSERVER_TYPE_BYTES) continue;
        // Strings that do not end where the tensor does.
        inputs.back().seen += random() % 2 == 0 ? "x" : "four";
        conversation.Infer("echo", inputs, "expected");
      }
    }
    const auto number = [&](Operation operation, int64_t subject, const std::vector<Values>& buckets,
                            const std::vector<std::string>& texts, const char* name = "metric") {
      return static_cast<int64_t>(conversation.Ask(operation, name, subject, buckets, texts, &text).length);
    };
    Values buckets;
    buckets.name = "buckets";
    buckets.dtype = static_cast<TRITONSERVER_DataType>(12);  // FP64
    buckets.dims = {2};
    buckets.seen.assign(16, 1);
    Values none = buckets;
    none.dims = {0};
    none.seen.clear();
    const std::vector<std::string> wrong{"a", "b", "c"};
    for (int round = 0; round < 3; ++round) {
      const int64_t family = number(Operation::kMetricFamily, 0, {}, {"text"});
      CHECK(text.empty());
      const int64_t metric = number(Operation::kMetric, family, {}, {"a", "b"});
      CHECK(text.empty());
      number(Operation::kMetric, family, {buckets}, {"a"});
      CHECK(text.empty());
      CHECK((number(Operation::kMetric, family, {}, wrong), !text.empty()));
      CHECK((number(Operation::kMetric, family, {buckets}, wrong), !text.empty()));
      CHECK((number(Operation::kMetric, family, {none}, {"a"}), !text.empty()));
      CHECK((number(Operation::kMetricFamily, 0, {}, {"text"}, "wrong"), !text.empty()));
      CHECK((number(Operation::kLoadModel, 0, {buckets}, {"a", "b"}), !text.empty()));
      // Of one round all is left to the end of the connection, of another the metrics go with their family.
      if (round != 0) number(round == 1 ? Operation::kMetricFamilyDelete : Operation::kMetricDelete, round == 1 ? family : metric, {}, {});
      CHECK(text.empty() || round == 0);
    }
  }
}

uint64_t OpenDescriptors() {
  uint64_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

uint64_t Interesting(Random& random) {
  static const uint64_t kValues[] = {0, 1, 2, 3, 7, 8, 13, 63, 64, 65, 128, 4096, kArena - 64, kArena, kArena + 1, 0xffffffff,
                                     0x100000000, 0x7fffffffffffffff, 0xffffffffffffffff};
  return random() % 8 == 0 ? random() : kValues[random() % (sizeof(kValues) / sizeof(kValues[0]))];
}

// One worker whose messages are wrong in one way or another, until it is thrown out.
void Misbehave(const std::string& path, const std::string& record, Random& random) {
  Worker worker(path);
  worker.Announce();
  // What it is told has to be read, so that it is not given up for that.
  std::thread reading([&worker] {
    Message message{};
    while (worker.Receive(&message)) {
    }
  });
  for (int i = 0; i < 40; ++i) {
    std::string raw = record;
    for (uint64_t n = random() % 3; n > 0; --n) {
      const size_t width = size_t{1} << random() % 4;
      const uint64_t value = Interesting(random);
      std::memcpy(&raw[random() % (raw.size() - width) / width * width], &value, width);
    }
    std::memcpy(worker.memory, raw.data(), raw.size());
    Message message{};
    static const MessageType kTypes[] = {MessageType::kCall,    MessageType::kCall,   MessageType::kCall,
                                         MessageType::kCall,    MessageType::kRelease, MessageType::kCancel,
                                         MessageType::kSegment, MessageType::kSegmentClose};
    message.type = random() % 40 == 0 ? static_cast<uint16_t>(random()) : static_cast<uint16_t>(kTypes[random() % 8]);
    message.flags = static_cast<uint16_t>(random() % 8);
    message.batch = random() % 3 == 0 ? 9 : random() % 50;
    message.segment = random() % 20 == 0 ? static_cast<uint32_t>(Interesting(random)) : 1;
    message.index = random() % 3 == 0 ? static_cast<uint32_t>(random() % 16) : 1;
    message.offset = random() % 10 == 0 ? Interesting(random) : 0;
    message.length = random() % 10 == 0 ? Interesting(random) : raw.size();
    if (message.type == static_cast<uint16_t>(MessageType::kCall) && random() % 2 == 0) {
      // The number in the record agrees, so that the rest of it is read.
      message.batch = 9;
    }
    std::string body = Body(random() % 2 == 0 ? "stream" : "echo", random() % 4 == 0 ? static_cast<int64_t>(Interesting(random)) : -1);
    if (random() % 30 == 0) body.resize(random() % body.size());
    message.size = static_cast<uint32_t>(sizeof(message) + body.size());
    if (random() % 60 == 0) message.size = static_cast<uint32_t>(Interesting(random));
    std::string packet(reinterpret_cast<const char*>(&message), sizeof(message));
    packet += body;
    if (random() % 60 == 0) packet.resize(1 + random() % packet.size());
    if (!worker.SendRaw(packet)) break;
  }
  worker.Shutdown();
  reading.join();
}

// A worker that answers whether its model is ready, in a thread, until it is gone.
class Model {
 public:
  explicit Model(const std::string& path) : worker_(path) {
    Wait(0, 0, "");
    // What comes after it has been read when this is answered.
    Message ready{};
    ready.batch = ++number_;
    ready.index = static_cast<uint32_t>(Operation::kModelReady);
    CHECK(worker_.Send(MessageType::kCall, ready, Body("echo")));
    Message answer{};
    do {
      CHECK(worker_.Receive(&answer));
    } while (answer.batch != ready.batch);
    thread_ = std::thread([this] { Run(); });
  }
  ~Model() {
    Leave();
    thread_.join();
  }

  // What it says from now on; with `holds` it says so when it is told something else.
  void Say(double value, const std::string& text, bool holds = false) {
    std::lock_guard<std::mutex> lock(mutex_);
    value_ = value;
    text_ = text;
    holds_ = holds;
    changed_.notify_all();
  }
  void Leave() {
    worker_.Shutdown();
    Say(0, "");
  }
  uint64_t asked() const { return asked_; }

 private:
  void Wait(uint64_t answered, double value, const std::string& text) {
    Message call{};
    call.batch = ++number_;
    call.index = static_cast<uint32_t>(Operation::kReadiness);
    const CallBody body{static_cast<int64_t>(answered), value, 0, 0, {}};
    worker_.Send(MessageType::kCall, call, std::string(reinterpret_cast<const char*>(&body), sizeof(body)) + text);
  }
  void Run() {
    Message question{};
    while (worker_.Receive(&question)) {
      if (question.type != static_cast<uint16_t>(MessageType::kResult)) continue;
      ++asked_;
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !holds_; });
      Wait(question.length, value_, text_);
    }
  }

  Worker worker_;
  uint64_t number_ = 0;
  std::atomic<uint64_t> asked_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  double value_ = 1;
  std::string text_;
  bool holds_ = false;
  std::thread thread_;
};

std::string Check(Endpoint& endpoint) {
  TRITONSERVER_Error* error = endpoint.CheckModel("m_0");
  if (error == nullptr) return "";
  const std::string text = error->text;
  TRITONSERVER_ErrorDelete(error);
  return text;
}

void CheckReadiness(Endpoint& endpoint, const std::string& path, int threads, int checks) {
  const std::string unready = "Model 'm_0' is not ready (user-defined check failed).";
  // A model that says nothing of itself is ready.
  CHECK(Check(endpoint).empty());
  {
    Model model(path);
    CHECK(Check(endpoint).empty());
    model.Say(0, "");
    CHECK(Check(endpoint) == unready);
    model.Say(1, "ValueError: no weights");
    CHECK(Check(endpoint) == "ValueError: no weights");
    model.Say(1, "");
    std::atomic<int> ready{0};
    std::vector<std::thread> askers;
    for (int i = 0; i < threads; ++i) {
      askers.emplace_back([&] {
        for (int n = 0; n < checks; ++n) ready += Check(endpoint).empty();
      });
    }
    for (auto& asker : askers) asker.join();
    CHECK(ready == threads * checks);
    CHECK(model.asked() <= static_cast<uint64_t>(ready) + 3);
    // One that does not answer: neither who has asked nor who shares the question waits for ever.
    model.Say(1, "", true);
    uint64_t before = model.asked();
    std::thread other([&] { CHECK(Check(endpoint).find("Timed out") == 0); });
    CHECK(Check(endpoint).find("Timed out") == 0);
    other.join();
    CHECK(model.asked() == before + 1);
    // What it says late counts for whoever asks then.
    model.Say(0, "");
    CHECK(Check(endpoint) == unready);
    model.Say(1, "", true);
    before = model.asked();
    std::thread gone([&] { CHECK(Check(endpoint).find("ended before it had said") != std::string::npos); });
    while (model.asked() == before) usleep(1000);
    model.Leave();
    gone.join();
  }
  while (!Check(endpoint).empty()) usleep(1000);
  // Another one takes the place of one that is still there.
  Model first(path);
  first.Say(0, "");
  CHECK(Check(endpoint) == unready);
  Model second(path);
  CHECK(Check(endpoint).empty());
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc >= 4);
  const std::string mode = argv[1];
  char folder[] = "/tmp/pytriton-calls-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  Settings settings;
  settings.endpoint = std::string(folder) + "/sock";
  const uint64_t descriptors = OpenDescriptors();
  uint64_t lives = 0;
  inputs_stay = mode != "fuzz";
  {
    Executor threads;
    executor = &threads;
    Endpoint endpoint({"model", 1}, settings);
    std::string error;
    CHECK(OfferCalls(nullptr, {"model", 1}, &endpoint) == nullptr);
    CHECK(endpoint.Listen(&error));
    if (mode == "load") {
      const int callers = std::stoi(argv[2]);
      const int calls = std::stoi(argv[3]);
      std::vector<std::thread> living;
      for (int i = 0; i < callers; ++i) {
        living.emplace_back([&, i] {
          for (uint64_t life = 0; life < 6; ++life) Live(settings.endpoint, calls, i * 100 + life);
        });
      }
      for (auto& thread : living) thread.join();
      lives = 6 * callers;
    } else if (mode == "types") {
      CheckTypes(std::stoi(argv[2]), std::strtoull(argv[3], nullptr, 10));
    } else if (mode == "ready") {
      CheckReadiness(endpoint, settings.endpoint, std::stoi(argv[2]), std::stoi(argv[3]));
    } else {
      CHECK(argc == 5);
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<long>(std::atof(argv[2]) * 1e3));
      Random random(std::strtoull(argv[3], nullptr, 10));
      const std::string record = Read(std::string(argv[4]) + "/record_call.bin");
      while (std::chrono::steady_clock::now() < end) {
        Misbehave(settings.endpoint, record, random);
        ++lives;
      }
      // The endpoint serves those who behave, as before.
      Live(settings.endpoint, 50, 1);
    }
    // Loads go on in threads of their own; each ends by itself.
    while (!NothingIsLeft()) usleep(1000);
  }
  for (const auto* trace : lost_traces) delete trace;
  while (OpenDescriptors() > descriptors) usleep(1000);
  CHECK(rmdir(folder) == 0);
  std::printf("%lu lives, %lu loads, %ld cancelled\n", lives, loads.load(), cancelled.load());
  CHECK(mode != "load" || (loads > 0 && cancelled > 0));
  return 0;
}
