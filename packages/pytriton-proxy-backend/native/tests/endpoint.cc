// Endpoints under load, for the thread sanitizer: many threads execute batches while workers answer, leave and break
// off. `endpoint EXECUTES WORKERS BATCHES`. Of three lives of a worker one says itself when it can take the next batch, and
// one takes it ahead. Triton is not there: the double of `Batch` below counts how it ends.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../proxy/link/endpoint.h"
#include "check.h"
#include "messages.h"
#include "triton_double.h"

namespace {

std::atomic<uint64_t> answered{0};
std::atomic<uint64_t> lost{0};
std::atomic<uint64_t> destroyed{0};
std::atomic<uint64_t> ahead{0};

}  // namespace

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory*, const uint32_t) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory*) { return nullptr; }

}  // extern "C"

namespace pytriton {

Batch::~Batch() {
  CHECK(open_ == 0);
  ++destroyed;
}

void Batch::Collect(BatchSource* source) {
  source->Clear();
  source->requests.resize(1);
}

bool Batch::CompleteRecord(const BatchSource&, const BatchLayout&, uint8_t*) { return true; }

void Batch::Respond(const ResponseRecord&) { CHECK(!"a response"); }

void Batch::Fail(TRITONSERVER_Error_Code, const std::string& text) {
  CHECK(open_ == 1);
  // A worker answers a batch that was sent ahead only when its turn has come; no other worker has any that waits.
  CHECK(text != "answer" || !waits);
  open_ = 0;
  ++(text == "answer" ? answered : lost);
}

void Batch::StartAgain(uint64_t id) { id_ = id; }
void Batch::LookAtPaces(uint64_t, int, uint64_t, const std::function<bool(uint32_t, bool)>&) {}

bool Batch::is_paused() const { return false; }

void Batch::EndStalled(uint64_t, uint64_t, const std::function<std::string()>&, const Tell&) {}

void Batch::PollCancelled(const Tell&) {}

}  // namespace pytriton

using namespace pytriton;

namespace {

constexpr char kAnswer[] = "answer";

// A worker at the wire, which answers batches with an error whose text is the answer.
class Worker {
 public:
  Worker(const std::string& path, uint64_t capabilities)
      : says_executed_(capabilities == kCapExecuted),
        takes_ahead_(capabilities == kCapAhead),
        fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size());
    // Where nobody listens any more, the next message is the end.
    if (connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return;
    Greeting greeting{};
    std::memcpy(greeting.magic, kMagic, sizeof(kMagic));
    greeting.major = kMajor;
    greeting.max_in_flight = takes_ahead_ ? 1 : 2;
    greeting.capabilities = capabilities;
    Send(MessageType::kHello, 0, {}, &greeting, sizeof(greeting));
  }
  ~Worker() { close(fd_); }

  // The next message, kRefuse at the end of the connection.
  MessageType Receive(Message* message) {
    return ReceiveMessage(fd_, message) ? static_cast<MessageType>(message->type) : MessageType::kRefuse;
  }

  void Send(MessageType type, uint16_t flags, Message message, const void* body, size_t length) {
    message.type = static_cast<uint16_t>(type);
    message.flags = flags;
    message.size = static_cast<uint32_t>(sizeof(Message) + length);
    std::string packet(reinterpret_cast<const char*>(&message), sizeof(message));
    packet.append(static_cast<const char*>(body), length);
    // Here, too.
    send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL);
  }

  // Answers `count` batches, every other one before its input is given back.
  bool Serve(int count) {
    Message message{};
    for (int i = 0; i < count;) {
      const MessageType type = Receive(&message);
      if (type == MessageType::kRefuse) return false;
      if (type != MessageType::kBatch) continue;
      if (takes_ahead_) {
        usleep(2000);
        if (HasBatch()) ++ahead;
      }
      const uint16_t released = i % 2 == 0 ? kFlagInputReleased : 0;
      Message answer{};
      answer.batch = message.batch;
      // Before its answer, behind it, or with it.
      const bool early = says_executed_ && i % 3 == 0;
      const bool late = says_executed_ && i % 3 == 1;
      if (early) Send(MessageType::kExecuted, 0, answer, nullptr, 0);
      Send(MessageType::kFail, kFlagBatchDone | released | (late ? kFlagExecuting : 0), answer, kAnswer,
           std::strlen(kAnswer));
      if (late) {
        // Until then nothing comes.
        CHECK(!HasBatch());
        Send(MessageType::kExecuted, 0, answer, nullptr, 0);
      }
      if (released == 0) {
        Message release{};
        release.segment = message.segment;
        release.offset = message.offset;
        Send(MessageType::kRelease, 0, release, nullptr, 0);
      }
      ++i;
    }
    return true;
  }

  bool HasBatch() {
    Message message{};
    return recv(fd_, &message, sizeof(message), MSG_PEEK | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof(message)) &&
           message.type == static_cast<uint16_t>(MessageType::kBatch);
  }

  // Answers what has crossed the message that asks to leave.
  void Detach() {
    Send(MessageType::kDetach, 0, {}, nullptr, 0);
    Serve(INT32_MAX);
  }

 private:
  const bool says_executed_;
  const bool takes_ahead_;
  const int fd_;
};

void ServeUntil(const std::string& path, const std::atomic<bool>& finished, int number) {
  for (int life = number; !finished; ++life) {
    constexpr uint64_t kKinds[] = {0, kCapExecuted, kCapAhead};
    Worker worker(path, kKinds[life % 3]);
    if (!worker.Serve(200)) return;
    // Every other one breaks off, with the batches that it has.
    if (life % 2 != 0) worker.Detach();
  }
}

constexpr uint64_t kWoken = 20;  // batches

// A batch without a worker wakes one that is asleep, once, and goes to the worker that attaches next.
void WakeOneThatSleeps(const std::string& folder) {
  Settings settings;
  settings.endpoint = folder + "/asleep";
  settings.attach_timeout_ms = 600000;
  const uint64_t before = answered, gone = destroyed;
  {
    Endpoint endpoint({"model", 1}, settings);
    std::string error;
    CHECK(endpoint.Listen(&error));
    Worker asleep(settings.endpoint, kCapAsleep);
    Message message{};
    CHECK(asleep.Receive(&message) == MessageType::kWelcome);
    std::thread executing([&] {
      for (uint64_t n = 0; n < kWoken; ++n) {
        endpoint.Execute(std::make_unique<Batch>(
            endpoint.NextBatchId(), nullptr, nullptr, 1, true, false, endpoint.in_flight(), endpoint.late_ends()));
      }
    });
    // No segment comes before it.
    CHECK(asleep.Receive(&message) == MessageType::kWake);
    CHECK(endpoint.IsReady());
    std::thread serving([&] {
      Worker worker(settings.endpoint, 0);
      CHECK(worker.Serve(kWoken));
      worker.Detach();
    });
    executing.join();
    while (destroyed < gone + kWoken) usleep(1000);
    serving.join();
    // It is told nothing more before it goes, and is let go.
    asleep.Send(MessageType::kDetach, 0, {}, nullptr, 0);
    CHECK(asleep.Receive(&message) == MessageType::kRefuse);
  }
  CHECK(answered == before + kWoken);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 4);
  const int executes = std::stoi(argv[1]);
  const int workers = std::stoi(argv[2]);
  const int batches = std::stoi(argv[3]);
  char folder[] = "/tmp/pytriton-endpoint-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  Settings settings;
  settings.endpoint = std::string(folder) + "/sock";
  settings.attach_timeout_ms = 600000;
  settings.repeatable = true;
  std::atomic<bool> finished{false};
  std::vector<std::thread> serving, executing;
  {
    Endpoint endpoint({"model", 1}, settings);
    std::string error;
    CHECK(endpoint.Listen(&error));
    for (int i = 0; i < workers; ++i) serving.emplace_back([&, i] { ServeUntil(settings.endpoint, finished, i); });
    for (int i = 0; i < executes; ++i) {
      executing.emplace_back([&] {
        for (int n = 0; n < batches; ++n) {
          endpoint.Execute(std::make_unique<Batch>(
              endpoint.NextBatchId(), nullptr, nullptr, 1, true, false, endpoint.in_flight(), endpoint.late_ends()));
        }
      });
    }
    for (auto& thread : executing) thread.join();
    // What is still in flight, or was put back, is the background thread's.
    while (destroyed < static_cast<uint64_t>(executes) * batches) usleep(1000);
    finished = true;
  }
  for (auto& thread : serving) thread.join();
  WakeOneThatSleeps(folder);
  answered -= kWoken;
  CHECK(answered + lost == static_cast<uint64_t>(executes) * batches && answered > lost);
  CHECK(rmdir(folder) == 0);
  // It has one when there is always a next batch, and no other worker to take it.
  CHECK(executes == 1 || workers > 1 || ahead > 0);
  std::printf("%lu answered, %lu lost, %lu sent ahead\n", answered.load(), lost.load(), ahead.load());
  return 0;
}
