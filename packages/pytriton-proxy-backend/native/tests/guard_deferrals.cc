// Messages to the threads of the front end for HTTP: with sockets as libevhtp makes them, several writers, and readers
// that are behind, that are late, and that leave.

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "../guard/workarounds/http_deferrals.h"
#include "check.h"

namespace {

using pytriton::guard::HttpDeferrals;

constexpr size_t kSize = 17;

struct Pipe {
  explicit Pipe(HttpDeferrals* deferrals) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    for (const int fd : fds) CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
    reader = fds[0];
    writer = fds[1];
    deferrals->OnPair(reader, writer);
  }
  ~Pipe() {
    close(reader);
    close(writer);
  }
  int reader, writer;
};

std::array<char, kSize> Message(uint32_t from, uint32_t number) {
  std::array<char, kSize> message{};
  memcpy(message.data(), &from, sizeof(from));
  memcpy(message.data() + sizeof(from), &number, sizeof(number));
  return message;
}

// Reads a message as a thread of the front end does; false if there is none.
bool Read(HttpDeferrals* deferrals, const Pipe& pipe, uint32_t* from, uint32_t* number) {
  std::array<char, kSize> message;
  const ssize_t size = recv(pipe.reader, message.data(), kSize, 0);
  if (size < 0 && errno == EAGAIN) return false;
  CHECK(size == static_cast<ssize_t>(kSize));
  deferrals->OnRead(pipe.reader, send);
  memcpy(from, message.data(), sizeof(*from));
  memcpy(number, message.data() + sizeof(*from), sizeof(*number));
  return true;
}

void NothingIsLost() {
  constexpr uint32_t kWriters = 3;
  constexpr uint32_t kEach = 20000;
  HttpDeferrals deferrals;
  Pipe pipe(&deferrals);
  std::vector<std::thread> writers;
  for (uint32_t from = 0; from < kWriters; ++from) {
    writers.emplace_back([&, from] {
      for (uint32_t number = 0; number < kEach; ++number) {
        const auto message = Message(from, number);
        CHECK(deferrals.Write(pipe.writer, message.data(), kSize, 0, send) == static_cast<ssize_t>(kSize));
      }
    });
  }
  std::vector<uint32_t> next(kWriters, 0);
  for (uint32_t count = 0; count < kWriters * kEach;) {
    pollfd readable{pipe.reader, POLLIN, 0};
    // What is kept while nothing is in the socket would never be read.
    CHECK(poll(&readable, 1, 60000) == 1);
    uint32_t from, number;
    if (!Read(&deferrals, pipe, &from, &number)) continue;
    CHECK(from < kWriters && number == next[from]);
    ++next[from];
    ++count;
  }
  for (auto& writer : writers) writer.join();
  uint32_t from, number;
  CHECK(!Read(&deferrals, pipe, &from, &number));
}

// The thread reads all that there is between a writer's attempt and the moment at which it notes what found no room.
const Pipe* g_pipe;
bool g_drains;

ssize_t SendAndDrain(int fd, const void* data, size_t size, int flags) {
  const ssize_t sent = send(fd, data, size, flags);
  const int error = errno;
  if (sent < 0 && g_drains) {
    g_drains = false;
    std::array<char, kSize> message;
    while (recv(g_pipe->reader, message.data(), kSize, 0) > 0) {
    }
  }
  errno = error;
  return sent;
}

void WhatIsKeptIsSentThoughNobodyReads() {
  HttpDeferrals deferrals;
  Pipe pipe(&deferrals);
  g_pipe = &pipe;
  g_drains = true;
  uint32_t number = 0;
  while (g_drains) {
    const auto message = Message(0, number++);
    CHECK(deferrals.Write(pipe.writer, message.data(), kSize, 0, SendAndDrain) == static_cast<ssize_t>(kSize));
  }
  uint32_t from, read;
  CHECK(Read(&deferrals, pipe, &from, &read));
  CHECK(read == number - 1);
}

// A thread writes to itself, too, and must not wait.
void AThreadWritesToItself() {
  HttpDeferrals deferrals;
  Pipe pipe(&deferrals);
  constexpr uint32_t kCount = 5000;
  for (uint32_t number = 0; number < kCount; ++number) {
    const auto message = Message(0, number);
    CHECK(deferrals.Write(pipe.writer, message.data(), kSize, 0, send) == static_cast<ssize_t>(kSize));
  }
  uint32_t from, number;
  for (uint32_t count = 0; count < kCount; ++count) {
    CHECK(Read(&deferrals, pipe, &from, &number));
    CHECK(number == count);
  }
  CHECK(!Read(&deferrals, pipe, &from, &number));
}

void OthersAreLeftAlone() {
  HttpDeferrals deferrals;
  Pipe pipe(&deferrals);
  CHECK(deferrals.IsTo(pipe.writer, kSize));
  CHECK(!deferrals.IsTo(pipe.writer, kSize + 1));
  CHECK(!deferrals.IsTo(pipe.reader, kSize));
  CHECK(!deferrals.IsTo(-1, kSize));
  CHECK(!deferrals.IsTo(1 << 20, kSize));
  const auto message = Message(0, 0);
  // Of a reader that has gone the writer is told.
  shutdown(pipe.reader, SHUT_RDWR);
  CHECK(deferrals.Write(pipe.writer, message.data(), kSize, MSG_NOSIGNAL, send) == -1);
  CHECK(errno == EPIPE);
  // The number of a descriptor that was closed is that of another one later.
  deferrals.OnClose(pipe.writer);
  deferrals.OnClose(-1);
  deferrals.OnClose(1 << 20);
  CHECK(!deferrals.IsTo(pipe.writer, kSize));
}

}  // namespace

int main() {
  NothingIsLost();
  WhatIsKeptIsSentThoughNobodyReads();
  AThreadWritesToItself();
  OthersAreLeftAlone();
  return 0;
}
