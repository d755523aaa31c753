// The proxy's end of a connection against the recorded conversations in tests/golden/traces, over a socket pair:
// `traces FILE...`. Their form stands in generate_traces.py. Triton is not there: its requests are those of the double
// of `Batch` below, which has one request with one input and says what is done with it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "../proxy/link/connection.h"
#include "check.h"
#include "triton_double.h"

namespace {

std::deque<std::string> events;  // what the connection did with its batches
std::deque<std::pair<uint64_t, uint32_t>> given_up;  // requests whose callers have gone

}  // namespace

namespace pytriton {

Batch::~Batch() { events.push_back("done " + std::to_string(id_)); }

void Batch::Collect(BatchSource* source) {
  static const float kInput[] = {1, 2};
  source->Clear();
  source->requests.resize(1);
  source->requests[0].rows = 1;
  source->outputs = {"y"};
  source->requests[0].output_count = 1;
  source->dims = {1, 2};
  source->pieces = {{reinterpret_cast<const char*>(kInput), sizeof(kInput)}};
  source->tensors = {{"x", 11, kWholeBatch, 0, 2, 0, 1, sizeof(kInput)}};
}

bool Batch::CompleteRecord(const BatchSource&, const BatchLayout&, uint8_t*) { return true; }

void Batch::Respond(const ResponseRecord& record) {
  events.push_back("answered " + std::to_string(id_));
  if (!decoupled_ || (record.entries()[0].flags & kResponseFinal) != 0) open_ = 0;
}

void Batch::Fail(TRITONSERVER_Error_Code, const std::string&) { open_ = 0; }

void Batch::LookAtPaces(uint64_t, int, uint64_t, const std::function<bool(uint32_t, bool)>&) {}

bool Batch::is_paused() const { return false; }

void Batch::EndStalled(uint64_t, uint64_t, const std::function<std::string()>&, const Tell&) {}

void Batch::PollCancelled(const Tell& tell) {
  while (!given_up.empty() && given_up.front().first == id_ && tell(given_up.front().second)) given_up.pop_front();
}

}  // namespace pytriton

using namespace pytriton;

namespace {

constexpr uint64_t kSecondNs = 1000000000;

class Owner : public ConnectionOwner {
 public:
  void WorkerLost(const std::string&) override { lost = true; }
  void TakeBack(std::unique_ptr<Batch>) override { CHECK(!"a batch that may go to another worker"); }
  Activity GetActivity() const override { return {0, 0}; }
  bool lost = false;
};

std::string FromHex(const std::string& hex) {
  std::string raw;
  for (size_t at = 0; at < hex.size(); at += 2) raw += static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16));
  return raw;
}

// A packet without what is free in it: the sender of a greeting, and the text of a refusal.
std::string Comparable(const std::string& packet) {
  constexpr size_t kVersionEnd = sizeof(Message) + offsetof(Greeting, pid);
  const auto type = static_cast<MessageType>(static_cast<uint8_t>(packet[0]));
  if (type == MessageType::kRefuse) return packet.substr(0, 4) + packet.substr(sizeof(Message), 12);
  if (type != MessageType::kWelcome) return packet;
  return packet.substr(0, kVersionEnd) + packet.substr(sizeof(Message) + offsetof(Greeting, max_in_flight));
}

struct Received {
  std::string packet;
  int descriptors = 0;
};

class Replay {
 public:
  Replay(bool decoupled, uint64_t budget) {
    settings_.decoupled = decoupled;
    settings_.arena_budget_bytes = budget;
    settings_.tensors_digest = "07e15f480f14f849abbf0cefca44dce9";
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    worker_ = ends[0];
    connection_ = std::make_unique<Connection>(ends[1], model_, settings_, &owner_);
  }

  ~Replay() {
    connection_.reset();
    close(worker_);
    for (const auto& entry : memory_) munmap(entry.second.first, entry.second.second);
    events.clear();
    given_up.clear();
  }

  // What the worker sends.
  void Send(const std::string& name, int descriptors, const std::string& packet) {
    int fd = -1;
    if (descriptors > 0) {
      Message message{};
      std::memcpy(&message, packet.data(), std::min(packet.size(), sizeof(message)));
      const uint64_t size = std::max<uint64_t>(message.length, 4096);
      fd = memfd_create("trace", MFD_CLOEXEC | MFD_ALLOW_SEALING);
      CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
      if (name == "SEGMENT" && memory_.count(message.segment) == 0) {
        void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(address != MAP_FAILED);
        memory_[message.segment] = {static_cast<uint8_t*>(address), size};
      }
    }
    iovec part{const_cast<char*>(packet.data()), packet.size()};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd >= 0) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
      cmsg->cmsg_level = SOL_SOCKET;
      cmsg->cmsg_type = SCM_RIGHTS;
      cmsg->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(cmsg), &fd, sizeof(int));
    }
    CHECK(sendmsg(worker_, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(packet.size()));
    if (fd >= 0) close(fd);
    connection_->Process();
  }

  // What the worker receives; an empty packet where nothing is there.
  Received Receive() {
    Received received;
    char packet[kMaxPacket];
    iovec part{packet, sizeof(packet)};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t size = recvmsg(worker_, &header, MSG_CMSG_CLOEXEC);
    if (size <= 0) return received;
    received.packet.assign(packet, static_cast<size_t>(size));
    for (cmsghdr* cmsg = CMSG_FIRSTHDR(&header); cmsg != nullptr; cmsg = CMSG_NXTHDR(&header, cmsg)) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(cmsg), sizeof(int));
      close(fd);
      ++received.descriptors;
    }
    return received;
  }

  void Write(uint32_t segment, uint64_t offset, const std::string& raw) {
    const auto found = memory_.find(segment);
    CHECK(found != memory_.end() && offset + raw.size() <= found->second.second);
    std::memcpy(found->second.first + offset, raw.data(), raw.size());
  }

  void SendBatch(uint64_t number) {
    CHECK(connection_->idle() && connection_->Claim());
    auto batch = std::make_unique<Batch>(number, nullptr, nullptr, 1, true, settings_.decoupled, nullptr, nullptr);
    BatchSource scratch;
    std::string error;
    CHECK(connection_->Send(&batch, &scratch, &error) == Connection::SendResult::kSent);
  }

  void Tick() { connection_->Tick(NowNs() + kSecondNs); }

  void CheckEnd(const std::string& how) {
    CHECK(connection_->state() == ConnectionState::kClosed);
    // One that was refused was never attached, so it cannot be lost.
    CHECK(owner_.lost == (how == "violation"));
    CHECK(Receive().packet.empty());
    if (how == "violation") events.clear();
    ended_ = true;
  }

  void CheckNothingIsLeft() {
    CHECK(events.empty());
    CHECK(given_up.empty());
    CHECK(ended_ || connection_->state() != ConnectionState::kClosed);
    CHECK(Receive().packet.empty());
  }

 private:
  const ModelIdentity model_{"model", 1};
  Settings settings_;
  Owner owner_;
  int worker_ = -1;
  std::unique_ptr<Connection> connection_;
  std::map<uint32_t, std::pair<uint8_t*, uint64_t>> memory_;
  bool ended_ = false;
};

std::string Fact(const std::string& line, const std::string& name) {
  const size_t at = line.find(name + "=");
  CHECK(at != std::string::npos);
  return line.substr(at + name.size() + 1, line.find(' ', at) - at - name.size() - 1);
}

// Returns whether the trace is one of a native proxy.
bool Play(const char* path) {
  std::ifstream file(path);
  std::string about, sides, link, settings;
  CHECK(std::getline(file, about) && std::getline(file, sides) && std::getline(file, link) &&
        std::getline(file, settings));
  if (sides.find("proxy") == std::string::npos || link != "link unix") return false;
  Replay replay(Fact(settings, "decoupled") == "1", std::stoull(Fact(settings, "budget")));
  std::string line;
  while (std::getline(file, line)) {
    std::fprintf(stderr, "%s: %.100s\n", path, line.c_str());
    std::istringstream words(line);
    std::string verb, side, what;
    words >> verb >> side >> what;
    if (verb == "send") {
      int descriptors;
      std::string parts, hex;
      words >> descriptors >> parts >> hex;
      if (side == "worker") {
        replay.Send(what, descriptors, FromHex(hex));
      } else {
        Received received = replay.Receive();
        if (received.packet.empty() && what == "RELEASE") {
          // A proxy may tell of what it has read some time later.
          replay.Tick();
          received = replay.Receive();
        }
        CHECK(!received.packet.empty());
        CHECK(Comparable(received.packet) == Comparable(FromHex(hex)));
        CHECK(received.descriptors == descriptors);
      }
    } else if (verb == "write") {
      uint64_t offset;
      std::string hex;
      words >> offset >> hex;
      replay.Write(static_cast<uint32_t>(std::stoul(what)), offset, FromHex(hex));
    } else if (verb == "do" && side == "proxy") {
      uint64_t batch = 0;
      uint32_t request = 0;
      words >> batch >> request;
      if (what == "batch") {
        replay.SendBatch(batch);
      } else {
        if (what == "cancel") given_up.emplace_back(batch, request);
        replay.Tick();
      }
    } else if (verb == "see" && side == "proxy" && what != "freed") {
      // That a block is free shows where the next batch has its place.
      std::string number;
      words >> number;
      CHECK(!events.empty() && events.front() == what + " " + number);
      events.pop_front();
    } else if (verb == "end" && side == "proxy") {
      replay.CheckEnd(what);
    }
  }
  replay.CheckNothingIsLeft();
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  int played = 0;
  for (int i = 1; i < argc; ++i) played += Play(argv[i]) ? 1 : 0;
  CHECK(played > 0);
  std::printf("%d\n", played);
  return 0;
}
