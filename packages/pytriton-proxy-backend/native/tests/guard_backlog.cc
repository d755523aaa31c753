// What waits for the caller of a stream: sums, and that whoever waits for less of it is woken in any order of events.
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "../guard/answers/stream_backlog.h"
#include "check.h"

using pytriton::guard::GivenResponse;
using pytriton::guard::StreamBacklog;

namespace {

constexpr uint64_t kSize = 2 * StreamBacklog::kLeast;

bool IsWoken(int event_fd, int timeout_ms) {
  pollfd event{event_fd, POLLIN, 0};
  return poll(&event, 1, timeout_ms) == 1;
}

void Sums() {
  StreamBacklog backlog;
  backlog.Add(1);
  CHECK(backlog.waiting() == StreamBacklog::kLeast);
  backlog.Add(kSize);
  backlog.Write(9, 1);
  CHECK(backlog.waiting() == kSize);
  // A front end may write what was not announced.
  backlog.Write(9, 7);
  CHECK(backlog.waiting() == 0);
  backlog.Hold(5);
  CHECK(backlog.waiting() == 5);
  // What one front end was given, and hands on to the other.
  backlog.Add(kSize);
  CHECK(backlog.waiting() == kSize + 5);
  backlog.Hold(7);
  backlog.Pass(2);
  CHECK(backlog.waiting() == 7 && backlog.SeeTaken() == StreamBacklog::kLeast + kSize);
}

void WhatIsTakenIsSeen() {
  StreamBacklog backlog;
  const uint64_t large = 10 * kSize;
  backlog.Add(large);
  backlog.Add(1);
  CHECK(backlog.SeeTaken() == 0);
  // A part of a large response, which waits as before.
  backlog.Write(7, 0);
  CHECK(backlog.SeeTaken() == 7 && backlog.waiting() == large + StreamBacklog::kLeast);
  // As JSON it is larger than it counts, and who takes that takes something to the end.
  uint64_t taken = 7;
  for (int part = 0; part < 4; ++part) {
    backlog.Write(large, 0);
    CHECK(backlog.SeeTaken() == (taken += large));
  }
  backlog.Write(5, 1);
  CHECK(backlog.SeeTaken() == taken && backlog.waiting() == StreamBacklog::kLeast);
  backlog.Write(5, 1);
  CHECK(backlog.SeeTaken() == (taken += StreamBacklog::kLeast));
  backlog.Write(5, 0);
  CHECK(backlog.SeeTaken() == taken);
  backlog.Hold(9);
  CHECK(backlog.SeeTaken() == taken);
  backlog.Hold(8);
  CHECK(backlog.SeeTaken() == taken + 1);
}

// What the system has not handed to the caller's is not taken, and what a caller takes of that is seen.
void BuffersOfTheSystemDoNotHideTheCaller() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener, any, size) == 0 && listen(listener, 1) == 0 && getsockname(listener, any, &size) == 0);
  const int caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int least = 1;
  CHECK(setsockopt(caller, SOL_SOCKET, SO_RCVBUF, &least, sizeof(least)) == 0 && connect(caller, any, size) == 0);
  const int server = accept(listener, nullptr, nullptr);
  const std::string text(StreamBacklog::kLeast, 'x');
  StreamBacklog backlog;
  uint64_t given = 0;
  while (send(server, text.data(), text.size(), MSG_DONTWAIT) == static_cast<ssize_t>(text.size())) {
    backlog.Add(text.size());
    backlog.Write(text.size(), 1);
    given += text.size();
  }
  CHECK(backlog.SeeTaken() == given);
  StreamBacklog seen;
  seen.Add(given);
  seen.SetSocket(server);
  seen.Write(given, 1);
  CHECK(backlog.waiting() == 0 && seen.waiting() == 0);
  const uint64_t before = seen.SeeTaken();
  CHECK(before < given / 2);
  // Nothing is written meanwhile.
  std::string read(1 << 16, 0);
  for (uint64_t taken = 0; taken < given;) {
    const ssize_t part = recv(caller, read.data(), read.size(), 0);
    CHECK(part > 0);
    taken += static_cast<uint64_t>(part);
    CHECK(seen.SeeTaken() >= before);
  }
  CHECK(seen.SeeTaken() > before);
  seen.End();
  CHECK(seen.SeeTaken() == given);
  for (const int fd : {listener, caller, server}) close(fd);
}

void NothingWaitsForWhoHasGone() {
  const int event_fd = eventfd(0, EFD_NONBLOCK);
  StreamBacklog backlog;
  for (int i = 0; i < 4; ++i) backlog.Add(kSize);
  backlog.WakeBelow(kSize, event_fd);
  backlog.End();
  CHECK(backlog.waiting() == 0 && IsWoken(event_fd, 0));
  backlog.Add(kSize);
  backlog.Write(9, 1);
  CHECK(backlog.waiting() == 0);
  close(event_fd);
}

void TheOneWhoWaitsIsWokenOnce() {
  const int event_fd = eventfd(0, EFD_NONBLOCK);
  StreamBacklog backlog;
  for (int i = 0; i < 4; ++i) backlog.Add(kSize);
  backlog.WakeBelow(2 * kSize, event_fd);
  backlog.Write(9, 1);
  CHECK(!IsWoken(event_fd, 0));
  backlog.Write(9, 1);
  CHECK(IsWoken(event_fd, 0));
  uint64_t count = 0;
  CHECK(read(event_fd, &count, sizeof(count)) == sizeof(count) && count == 1);
  backlog.Write(9, 1);
  CHECK(!IsWoken(event_fd, 0));
  // What was taken before counts as well.
  backlog.WakeBelow(kSize, event_fd);
  CHECK(read(event_fd, &count, sizeof(count)) == sizeof(count));
  backlog.Add(kSize);
  backlog.WakeBelow(0, event_fd);
  backlog.WakeBelow(0, -1);
  backlog.Write(9, 9);
  CHECK(!IsWoken(event_fd, 0));
  close(event_fd);
}

void NoWakeUpIsLost() {
  constexpr int kRounds = 20'000;
  constexpr int kDeadlineMs = 600'000;
  const int event_fd = eventfd(0, EFD_NONBLOCK);
  const int go_fd = eventfd(0, EFD_SEMAPHORE);
  StreamBacklog backlog;
  // The front end writes all that there is, again and again, while the other thread asks to be told of that.
  std::thread front_end([&] {
    for (int round = 0; round < kRounds; ++round) {
      uint64_t count;
      CHECK(read(go_fd, &count, sizeof(count)) == sizeof(count));
      if (round % 2 == 0) {
        backlog.Write(9, 3);
      } else {
        backlog.Hold(0);
      }
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    if (round % 2 == 0) {
      for (int i = 0; i < 3; ++i) backlog.Add(kSize);
    } else {
      backlog.Hold(3 * kSize);
    }
    const uint64_t one = 1;
    CHECK(write(go_fd, &one, sizeof(one)) == sizeof(one));
    backlog.WakeBelow(kSize, event_fd);
    CHECK(IsWoken(event_fd, kDeadlineMs));
    uint64_t count;
    CHECK(read(event_fd, &count, sizeof(count)) == sizeof(count) && count == 1);
    CHECK(backlog.waiting() <= kSize);
  }
  front_end.join();
  close(go_fd);
  close(event_fd);
}

void AResponseLeadsToItsStream() {
  const auto stream = std::make_shared<StreamBacklog>();
  GivenResponse::Note(stream);
  CHECK(GivenResponse::TakeStream() == nullptr);
  GivenResponse::Announce(7, true);
  CHECK(GivenResponse::TakeBytes() == 7 && GivenResponse::TakeBytes() == 0);
  GivenResponse::Note(stream);
  // The response of another one, which follows from the first in the same thread.
  GivenResponse::Note(std::make_shared<StreamBacklog>());
  CHECK(GivenResponse::TakeStream() == stream);
  GivenResponse::Announce(0, false);
  CHECK(GivenResponse::TakeBytes() == 1);
  GivenResponse::Note(stream);
  CHECK(GivenResponse::TakeStream() == nullptr);
}

}  // namespace

int main() {
  Sums();
  WhatIsTakenIsSeen();
  BuffersOfTheSystemDoNotHideTheCaller();
  NothingWaitsForWhoHasGone();
  TheOneWhoWaitsIsWokenOnce();
  NoWakeUpIsLost();
  AResponseLeadsToItsStream();
}
