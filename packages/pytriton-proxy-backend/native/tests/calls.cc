// Calls into a double of Triton, which answers in threads of its own, in any order and form that Triton may.
// `calls load CALLERS CALLS`: for the thread sanitizer; callers leave, break off and cancel.
// `calls ready THREADS CHECKS`: workers that say whether their model is ready.
// `calls fuzz SECONDS SEED FOLDER`: mutated messages and records; FOLDER holds the golden vectors.
// Nothing may be left of either: no request, response or descriptor, and the endpoint goes on.
#include <dirent.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <fcntl.h>
#include <poll.h>

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
#include "../src/calls.h"
#include "check.h"
#include "messages.h"
#include "triton_double.h"

using Random = std::mt19937_64;

// ---- Triton ----------------------------------------------------------------------------------------------------------

struct TRITONSERVER_Error {
  TRITONSERVER_Error_Code code;
  std::string text;
};

struct TRITONSERVER_InferenceResponse {
  TRITONSERVER_ResponseAllocatorReleaseFn_t free_output = nullptr;
  TRITONSERVER_Error* error = nullptr;
  void* data = nullptr;
  size_t size = 0;
  int64_t shape = 0;
};

struct TRITONSERVER_ResponseAllocator {
  TRITONSERVER_ResponseAllocatorAllocFn_t make;
  TRITONSERVER_ResponseAllocatorReleaseFn_t free;
};

struct TRITONSERVER_InferenceRequest {
  std::string model;
  std::string input;  // all bytes of it, read when it is answered
  const void* data = nullptr;
  size_t size = 0;
  std::atomic<bool> cancelled{false};
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  TRITONSERVER_InferenceRequestReleaseFn_t released = nullptr;
  void* released_userp = nullptr;
  TRITONSERVER_InferenceResponseCompleteFn_t completed = nullptr;
  void* completed_userp = nullptr;
};

namespace {

std::atomic<int64_t> errors{0}, requests{0}, responses{0}, cancelled{0};
std::atomic<uint64_t> loads{0};

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

  static void Respond(TRITONSERVER_InferenceRequest* request, bool fails, uint32_t flags) {
    auto* response = new TRITONSERVER_InferenceResponse;
    ++responses;
    if (fails) {
      // One of the two is longer than a packet.
      response->error = TRITONSERVER_ErrorNew(
          TRITONSERVER_ERROR_UNAVAILABLE, std::string(request->size % 2 == 0 ? 20 : 6000, 'e').c_str());
    } else {
      TRITONSERVER_MemoryType memory;
      int64_t device;
      void* userp;
      CHECK(request->allocator->make(
                request->allocator, "y", request->size, TRITONSERVER_MEMORY_CPU, 0, nullptr, &response->data, &userp,
                &memory, &device) == nullptr);
      response->free_output = request->allocator->free;
      response->size = request->size;
      response->shape = static_cast<int64_t>(request->size);
      if (request->size != 0) std::memcpy(response->data, request->data, request->size);
    }
    request->completed(response, flags, request->completed_userp);
  }

  static void Answer(TRITONSERVER_InferenceRequest* request, Random& random) {
    const bool early = random() % 2 == 0;
    const auto completed = request->completed;
    void* userp = request->completed_userp;
    if (request->cancelled) ++cancelled;
    if (request->model == "stream") {
      for (uint64_t i = 0, count = random() % 4; i < count; ++i) Respond(request, i == 2, 0);
      if (early) request->released(request, 1, request->released_userp);
      completed(nullptr, TRITONSERVER_RESPONSE_COMPLETE_FINAL, userp);
      if (!early) request->released(request, 1, request->released_userp);
      return;
    }
    Respond(request, request->model == "error", TRITONSERVER_RESPONSE_COMPLETE_FINAL);
    request->released(request, 1, request->released_userp);
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

TRITONSERVER_Error* TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char* text) {
  ++errors;
  return new TRITONSERVER_Error{code, text};
}
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error* error) {
  --errors;
  delete error;
}
TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(TRITONSERVER_Error* error) { return error->code; }
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error* error) { return error->text.c_str(); }

TRITONSERVER_Error* TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory*, const uint32_t) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_ModelServer(TRITONBACKEND_Model*, TRITONSERVER_Server** server) {
  *server = nullptr;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestTrace(TRITONBACKEND_Request*, TRITONSERVER_InferenceTrace** trace) {
  *trace = nullptr;
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
    TRITONSERVER_Server*, TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceTrace*) {
  if (request->model == "refused") return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "refused");
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
TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(const char*, TRITONSERVER_ParameterType, const void*) { return nullptr; }
TRITONSERVER_Parameter* TRITONSERVER_ParameterBytesNew(const char*, const void*, uint64_t) { return nullptr; }
void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter*) {}

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
    TRITONSERVER_InferenceRequest*, const char* name, TRITONSERVER_DataType, const int64_t*, uint64_t) {
  return std::strcmp(name, "wrong") == 0 ? TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, "no such input")
                                         : nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputData(
    TRITONSERVER_InferenceRequest* request, const char*, const void* data, size_t size, TRITONSERVER_MemoryType, int64_t) {
  request->data = data;
  request->size = size;
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
  return response->error;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseDelete(TRITONSERVER_InferenceResponse* response) {
  --responses;
  if (response->error != nullptr) TRITONSERVER_ErrorDelete(response->error);
  if (response->free_output != nullptr) {
    response->free_output(nullptr, response->data, nullptr, response->size, TRITONSERVER_MEMORY_CPU, 0);
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
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutputCount(TRITONSERVER_InferenceResponse*, uint32_t* count) {
  *count = 1;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutput(
    TRITONSERVER_InferenceResponse* response, uint32_t, const char** name, TRITONSERVER_DataType* dtype,
    const int64_t** shape, uint64_t* dims, const void** base, size_t* size, TRITONSERVER_MemoryType* memory,
    int64_t* device, void** userp) {
  *name = "y";
  *dtype = static_cast<TRITONSERVER_DataType>(2);  // UINT8
  *shape = &response->shape;
  *dims = 1;
  *base = response->data;
  *size = response->size;
  *memory = TRITONSERVER_MEMORY_CPU;
  *device = 0;
  *userp = nullptr;
  return nullptr;
}

}  // extern "C"

namespace pytriton {

Batch::~Batch() {}
bool Batch::Collect(BatchSource*, std::string*) { return false; }
void Batch::Respond(const ResponseRecord&) {}
void Batch::Fail(TRITONSERVER_Error_Code, const std::string&) {}
void Batch::StartAgain(uint64_t) {}
void Batch::PollCancelled(const std::function<void(uint32_t)>&) {}

}  // namespace pytriton

using namespace pytriton;

namespace {

// ---- a worker that calls ---------------------------------------------------------------------------------------------

constexpr uint64_t kArena = 1u << 20;

class Worker {
 public:
  explicit Worker(const std::string& path) : fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
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

  // False where the connection has ended.
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

  // Ends what comes here, so that whoever reads returns.
  void Shutdown() { shutdown(fd_, SHUT_RDWR); }

  uint8_t* memory;

 private:
  const int fd_;
  int arena_;
};

std::string Body(const std::string& name, int64_t subject = -1) {
  const CallBody body{subject, 1.5, 0, 0, {}};
  return std::string(reinterpret_cast<const char*>(&body), sizeof(body)) + name;
}

// The place of the record of call `number`, of `size` bytes of input, written there.
Message Write(Worker& worker, uint64_t number, uint64_t place, uint64_t size, const char* input) {
  const std::string data(size, static_cast<char>(number));
  const int64_t dims[] = {static_cast<int64_t>(size)};
  BatchSource source;
  source.requests.resize(1);
  source.dims.assign(dims, dims + 1);
  source.pieces.push_back({data.data(), data.size()});
  source.tensors.push_back({input, 2, kWholeBatch, 0, 1, 0, 1, size});
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
    while (requests != 0 || responses != 0 || errors != 0) usleep(1000);
  }
  while (OpenDescriptors() > descriptors) usleep(1000);
  CHECK(rmdir(folder) == 0);
  std::printf("%lu lives, %lu loads, %ld cancelled\n", lives, loads.load(), cancelled.load());
  CHECK(mode != "load" || (loads > 0 && cancelled > 0));
  return 0;
}
