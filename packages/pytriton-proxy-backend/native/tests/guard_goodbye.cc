// What a server that is replaced says over its connections: GOAWAY between two frames of HTTP/2, and nothing to workers.
// `guard_goodbye NAME` runs one test; `guard_goodbye packets N` sends and receives N packets as the proxy does, to count.
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../guard/handover/http2_frames.h"
#include "../guard/shared.h"
#include "check.h"

using namespace pytriton::guard;

// By which the guard knows the server.
extern "C" __attribute__((visibility("default"))) void TRITONSERVER_ApiVersion() {}
// What is known of a connection is kept for the next with the same number, in a table that no leak detector looks into.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

namespace {

constexpr uint8_t kData = 0, kHeaders = 1, kSettings = 4;

std::atomic<uint8_t>* g_role = nullptr;
int g_starter = -1;

// Before the guard's own: what the starter of a server gives it.
__attribute__((constructor(101))) void GiveHandover() {
  const int page = memfd_create("handover", 0);
  int channel[2];
  CHECK(page >= 0 && ftruncate(page, 1) == 0 && socketpair(AF_UNIX, SOCK_SEQPACKET, 0, channel) == 0);
  g_role = static_cast<std::atomic<uint8_t>*>(mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0));
  CHECK(g_role != MAP_FAILED);
  *g_role = kServing;
  g_starter = channel[0];
  setenv("PYTRITON_GUARD_HANDOVER", (std::to_string(channel[1]) + "," + std::to_string(page)).c_str(), 1);
}

std::string Frame(uint8_t type, uint32_t stream, const std::string& payload) {
  const size_t size = payload.size();
  std::string frame = {static_cast<char>(size >> 16), static_cast<char>(size >> 8), static_cast<char>(size)};
  frame += {static_cast<char>(type), 0};
  for (const int shift : {24, 16, 8, 0}) frame += static_cast<char>(stream >> shift);
  return frame + payload;
}

std::string GoAwayText(uint32_t last_stream) {
  const auto frame = GoAway(last_stream);
  return std::string(frame.begin(), frame.end());
}

void Pass(Http2Frames* frames, std::string bytes) {
  const iovec part{bytes.data(), bytes.size()};
  frames->Pass(&part, 1, bytes.size());
}

void Frames() {
  CHECK(GoAwayText(0x01020304) == Frame(7, 0, std::string("\1\2\3\4\0\0\0\0", 8)));
  const std::vector<std::string> sent = {Frame(kSettings, 0, "123456"),         Frame(kSettings, 0, ""),
                                         Frame(kHeaders, 5, "h"),               Frame(kData, 9, std::string(300, 'd')),
                                         Frame(kHeaders, 0x80000003u, "lower"), Frame(kData, 5, "")};
  for (const size_t preface : {size_t{0}, size_t{24}}) {
    std::string stream(preface, 'P');
    std::set<size_t> ends;
    for (const std::string& frame : sent) ends.insert((stream += frame).size());
    for (size_t size = 0; size <= stream.size(); ++size) {
      for (size_t cut = 0; cut <= size; ++cut) {
        Http2Frames frames(preface);
        Pass(&frames, stream.substr(0, cut));
        Pass(&frames, stream.substr(cut, size - cut));
        CHECK(frames.is_between_frames() == (ends.count(size) == 1));
        if (size == stream.size()) CHECK(frames.last_stream() == 5);
      }
    }
    // Of several pieces, as much as was sent.
    for (size_t size = 0; size <= stream.size(); ++size) {
      std::vector<iovec> parts;
      for (size_t at = 0; at < stream.size(); at += 7) {
        parts.push_back({&stream[at], std::min<size_t>(7, stream.size() - at)});
        parts.push_back({nullptr, 0});
      }
      Http2Frames frames(preface);
      frames.Pass(parts.data(), parts.size(), size);
      CHECK(frames.is_between_frames() == (ends.count(size) == 1));
    }
  }
}

void Garbage() {
  const std::string others[] = {"HTTP/1.1 200 OK\r\n\r\n", std::string("\x16\x03\x01\x00\xa5\x01\x00\x00\xa1", 9),
                                Frame(kData, 0, ""), Frame(kSettings, 1, "")};
  for (const std::string& other : others) {
    for (const std::string& more : {std::string(), Frame(kSettings, 0, ""), Frame(kHeaders, 1, "")}) {
      Http2Frames frames;
      Pass(&frames, other + more);
      CHECK(!frames.is_between_frames() && (frames.last_stream() == 0));
    }
  }
  // A verdict for bytes of all kinds, the same for every cut.
  std::mt19937_64 random(1);
  for (int run = 0; run < 20000; ++run) {
    std::string stream = random() % 2 == 0 ? Frame(kSettings, 0, "") : "";
    for (size_t i = random() % 64; i > 0; --i) stream += static_cast<char>(random() % 4 == 0 ? random() : 0);
    Http2Frames whole, cut;
    Pass(&whole, stream);
    const size_t at = random() % (stream.size() + 1);
    Pass(&cut, stream.substr(0, at));
    Pass(&cut, stream.substr(at));
    CHECK(whole.is_between_frames() == cut.is_between_frames() && whole.last_stream() == cut.last_stream());
  }
}

struct Pair {
  explicit Pair(int family) {
    sockaddr_storage address{};
    address.ss_family = static_cast<sa_family_t>(family);
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    if (family == AF_INET) reinterpret_cast<sockaddr_in*>(&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    // The system chooses the port, or the name.
    socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sa_family_t);
    const int listener = socket(family, SOCK_STREAM, 0);
    CHECK(bind(listener, name, size) == 0 && listen(listener, 1) == 0);
    size = sizeof(address);
    CHECK(getsockname(listener, name, &size) == 0);
    caller = socket(family, SOCK_STREAM, 0);
    CHECK(connect(caller, name, size) == 0);
    server = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    CHECK(server >= 0);
    close(listener);
  }
  ~Pair() {
    close(caller);
    close(server);
  }

  int caller, server;
};

void Send(int fd, std::string bytes) {
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  CHECK(sendmsg(fd, &message, 0) == static_cast<ssize_t>(bytes.size()));
}

// What is received by recvmsg, up to so many bytes.
std::string Receive(int fd, size_t size, int flags = MSG_WAITALL) {
  std::string bytes(size, 0);
  iovec part{bytes.data(), size};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const ssize_t count = recvmsg(fd, &message, flags);
  CHECK(count >= 0);
  return bytes.substr(0, static_cast<size_t>(count));
}

void CheckReceived(int fd, const std::string& expected) { CHECK(Receive(fd, expected.size()) == expected); }

void CheckOver(const Pair& pair) {
  shutdown(pair.server, SHUT_WR);
  CHECK(Receive(pair.caller, 1).empty());
}

// Packets of workers may have any bytes; those of other kinds come through the internet as well.
void GoodbyeOfWriters() {
  const std::string settings = Frame(kSettings, 0, ""), data = Frame(kData, 1, "abc");
  for (const int family : {AF_INET, AF_UNIX}) {
    *g_role = kServing;
    const Pair pair(family);
    Send(pair.server, settings);
    Send(pair.server, data.substr(0, 4));
    CheckReceived(pair.caller, settings + data.substr(0, 4));
    *g_role = kStandingBy;
    Send(pair.server, data.substr(4));
    CheckReceived(pair.caller, data.substr(4));
    Send(pair.server, data);
    CheckReceived(pair.caller, family == AF_INET ? GoAwayText(kAnyStream) + data : data);
    Send(pair.server, data);
    CheckReceived(pair.caller, data);
    CheckOver(pair);
  }
  *g_role = kServing;
  const Pair pair(AF_INET);
  *g_role = kStandingBy;
  Send(pair.server, "HTTP/1.1 200 OK\r\n\r\n");
  Send(pair.server, settings);
  CheckReceived(pair.caller, "HTTP/1.1 200 OK\r\n\r\n" + settings);
  CheckOver(pair);
}

// Who asks a server that has left is told which requests it has seen, and is hung up on.
void GoodbyeOfReaders() {
  const std::string begin = std::string(24, 'P') + Frame(kSettings, 0, "") + Frame(kHeaders, 1, "first");
  const std::string second = Frame(kHeaders, 3, "second");
  for (const int family : {AF_INET, AF_UNIX}) {
    *g_role = kServing;
    const Pair pair(family);
    Send(pair.server, Frame(kSettings, 0, ""));
    Send(pair.caller, begin);
    CheckReceived(pair.server, begin);
    *g_role = kLeft;
    Send(pair.caller, second);
    const std::string seen = Receive(pair.server, second.size());
    CHECK(seen == (family == AF_INET ? "" : second));
    CheckReceived(pair.caller, Frame(kSettings, 0, "") + (family == AF_INET ? GoAwayText(1) : ""));
    CheckOver(pair);
  }
}

void Packets(int count) {
  const Pair pair(AF_UNIX);
  const std::string packet = Frame(kData, 1, std::string(100, 'x'));
  for (int i = 0; i < count; ++i) {
    Send(pair.server, packet);
    Receive(pair.caller, packet.size());
    Send(pair.caller, packet);
    Receive(pair.server, packet.size());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc >= 2);
  const std::string name = argv[1];
  if (name == "frames") {
    Frames();
  } else if (name == "garbage") {
    Garbage();
  } else if (name == "writers") {
    GoodbyeOfWriters();
  } else if (name == "readers") {
    GoodbyeOfReaders();
  } else if (name == "packets" && argc == 3) {
    Packets(std::atoi(argv[2]));
  } else {
    CHECK(!"a known test");
  }
  return 0;
}
