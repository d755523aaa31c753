// What waits for the caller of a stream: sums, and that whoever waits for less of it is woken in any order of events.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
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
  backlog.Take(1);
  CHECK(backlog.waiting() == kSize);
  // A front end may write what was not announced.
  backlog.Take(7);
  CHECK(backlog.waiting() == 0);
  backlog.Set(5);
  CHECK(backlog.waiting() == 5);
}

void WhatIsTakenIsSeen() {
  StreamBacklog backlog;
  auto has_taken = [&, last = backlog.taken()]() mutable {
    const uint64_t before = std::exchange(last, backlog.taken());
    return before != last;
  };
  backlog.Add(kSize);
  CHECK(!has_taken());
  // A part of a large response, which waits as before.
  backlog.NoteWritten(7);
  CHECK(has_taken() && backlog.waiting() == kSize);
  backlog.Take(1);
  CHECK(has_taken());
  backlog.Set(9);
  CHECK(!has_taken());
  backlog.Set(8);
  CHECK(has_taken());
}

void NothingWaitsForWhoHasGone() {
  const int event_fd = eventfd(0, EFD_NONBLOCK);
  StreamBacklog backlog;
  for (int i = 0; i < 4; ++i) backlog.Add(kSize);
  backlog.WakeBelow(kSize, event_fd);
  backlog.End();
  CHECK(backlog.waiting() == 0 && IsWoken(event_fd, 0));
  backlog.Add(kSize);
  backlog.Take(1);
  CHECK(backlog.waiting() == 0);
  close(event_fd);
}

void TheOneWhoWaitsIsWokenOnce() {
  const int event_fd = eventfd(0, EFD_NONBLOCK);
  StreamBacklog backlog;
  for (int i = 0; i < 4; ++i) backlog.Add(kSize);
  backlog.WakeBelow(2 * kSize, event_fd);
  backlog.Take(1);
  CHECK(!IsWoken(event_fd, 0));
  backlog.Take(1);
  CHECK(IsWoken(event_fd, 0));
  uint64_t count = 0;
  CHECK(read(event_fd, &count, sizeof(count)) == sizeof(count) && count == 1);
  backlog.Take(1);
  CHECK(!IsWoken(event_fd, 0));
  // What was taken before counts as well.
  backlog.WakeBelow(kSize, event_fd);
  CHECK(read(event_fd, &count, sizeof(count)) == sizeof(count));
  backlog.Add(kSize);
  backlog.WakeBelow(0, event_fd);
  backlog.WakeBelow(0, -1);
  backlog.Take(9);
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
        backlog.Take(3);
      } else {
        backlog.Set(0);
      }
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    if (round % 2 == 0) {
      for (int i = 0; i < 3; ++i) backlog.Add(kSize);
    } else {
      backlog.Set(3 * kSize);
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
  NothingWaitsForWhoHasGone();
  TheOneWhoWaitsIsWokenOnce();
  NoWakeUpIsLost();
  AResponseLeadsToItsStream();
}
