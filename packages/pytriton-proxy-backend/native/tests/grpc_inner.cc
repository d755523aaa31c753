// The connection to Triton's own front end: its end ends the calls in it alone, what gRPC would not take is not sent, and no
// call changes how the next one is read.
#include "../grpc/inner.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../grpc/framing.h"
#include "check.h"

using namespace pytriton::grpc;

namespace {

// Waits for the end of its call.
class Waiting : public Answer {
 public:
  void OnHeaders(Fields) override {}
  void OnData(std::string_view) override {}
  void OnEnd(Fields trailers) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    trailers_ = std::move(trailers);
    ++ends_;
    changed_.notify_all();
  }
  // The status and the text of the end, which comes once.
  std::string Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return ends_ > 0; });
    CHECK(ends_ == 1);
    std::string text;
    for (const auto& [name, value] : trailers_) text += name + "=" + value + ";";
    return text;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int ends_ = 0;
  Fields trailers_;
};

constexpr uint8_t kHeaders = 1;

// Reads from a connection until it has seen so many frames of headers; returns these.
std::vector<std::string> ReadHeaders(int fd, size_t count) {
  constexpr size_t kPreface = 24, kFrame = 9;
  std::string received;
  std::vector<std::string> found;
  size_t at = kPreface;
  while (found.size() < count) {
    char piece[4096];
    const ssize_t size = read(fd, piece, sizeof(piece));
    CHECK(size > 0);
    received.append(piece, static_cast<size_t>(size));
    for (;;) {
      if (received.size() < at + kFrame) break;
      const auto* const head = reinterpret_cast<const unsigned char*>(&received[at]);
      const size_t length = size_t{head[0]} << 16 | size_t{head[1]} << 8 | head[2];
      if (received.size() < at + kFrame + length) break;
      if (head[3] == kHeaders) found.push_back(received.substr(at + kFrame, length));
      at += kFrame + length;
    }
  }
  return found;
}

bool Has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

// A text comes out of its encoding as it went in, and what is no encoding stays as it is.
void TestPercents() {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  CHECK(PercentDecode(PercentEncode(all)) == all);
  CHECK(PercentDecode("100 %, %4, %zz, %c3%BC") == "100 %, %4, %zz, \xc3\xbc");
}

int main() {
  TestPercents();
  static Loop loop;  // its thread runs until the process ends
  CHECK(loop.Start());
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener, 8) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  static Inner inner(&loop);
  inner.SetAddress(reinterpret_cast<sockaddr*>(&address), size);

  // Ended without a word, in the middle of a frame, and by what is no HTTP/2.
  const std::string odd = "HTTP/1.1 400 Bad Request\r\n\r\n";
  for (const std::string& last : {std::string(), std::string("\0\0\x20\1", 4), odd}) {
    const auto first = std::make_shared<Waiting>();
    const auto second = std::make_shared<Waiting>();
    for (const auto& answer : {first, second}) {
      inner.Call({"/a/B", {{"mine", std::string(3000, 'v')}}, std::string(5, '\0')}, answer);
    }
    const int fd = accept(listener, nullptr, nullptr);
    CHECK(fd >= 0 && inner.IsOwn(fd));
    const auto headers = ReadHeaders(fd, 2);
    CHECK(headers[0] == headers[1]);
    const size_t length = last.size();
    CHECK(send(fd, last.data(), length, MSG_NOSIGNAL) == static_cast<ssize_t>(length));
    close(fd);
    for (const auto& answer : {first, second}) {
      const std::string end = answer->Wait();
      CHECK(Has(end, "grpc-status=14;") && Has(end, "front end for gRPC ended."));
    }
  }

  const auto large = std::make_shared<Waiting>();
  inner.Call({"/a/B", {{"one", std::string(4000, 'v')}, {"two", std::string(4100, 'v')}}, ""}, large);
  const std::string end = large->Wait();
  CHECK(Has(end, "grpc-status=8;") && Has(end, "have 8450 bytes") && Has(end, "takes 8192."));
  return 0;
}
