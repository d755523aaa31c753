// When a stream pauses, when it goes on, and from when on its caller is stalled: by a guard and a clock of this test.
#include "../proxy/batch/stream_pace.h"

#include "check.h"

using pytriton::StreamPace;

namespace {

constexpr uint64_t kMost = 1600;
constexpr uint64_t kLeast = 100;

struct Stream {
  uint64_t waiting = 0;
  uint64_t taken = 0;
  uint64_t below = 0;
  int event_fd = -1;
  bool is_dropped = false;
};

void OneWhoReadsNothingIsStalledFromThePause() {
  Stream stream;
  {
    StreamPace pace(&stream);
    stream.waiting = kMost;
    CHECK(!pace.Look(kMost, 7, 10) && pace.stalled_ns(1000) == 0);
    stream.waiting = kMost + 1;
    CHECK(pace.Look(kMost, 7, 20) && pace.is_paused());
    CHECK(stream.below == kMost / 2 && stream.event_fd == 7);
    CHECK(pace.Look(kMost, 7, 90) && pace.stalled_ns(100) == 80 && pace.stalled_ns(5) == 0);
    stream.waiting = kMost / 2;
    CHECK(!pace.Look(kMost, 7, 110) && pace.stalled_ns(1000) == 0);
  }
  CHECK(stream.is_dropped && stream.event_fd == -1);
}

void OneWhoTricklesIsStalledAsWell() {
  Stream stream;
  StreamPace pace(&stream);
  stream.waiting = kMost + 1;
  stream.taken = 5000;
  CHECK(pace.Look(kMost, 7, 0));
  for (uint64_t now = 1; now < kLeast; ++now) {
    ++stream.taken;
    CHECK(pace.Look(kMost, 7, now) && pace.stalled_ns(now) == now);
  }
  ++stream.taken;
  CHECK(pace.Look(kMost, 7, kLeast) && pace.stalled_ns(kLeast) == 0);
  // What was taken is counted from then on.
  stream.taken += kLeast - 1;
  CHECK(pace.Look(kMost, 7, 2 * kLeast) && pace.stalled_ns(2 * kLeast) == kLeast);
  ++stream.taken;
  CHECK(pace.Look(kMost, 7, 3 * kLeast) && pace.stalled_ns(3 * kLeast) == 0);
}

void ThatLeastHasLimits() {
  CHECK(StreamPace::LeastTaken(kMost) == kLeast);
  CHECK(StreamPace::LeastTaken(1) == 1);
  CHECK(StreamPace::LeastTaken(4 << 20) == 256 * 1024 && StreamPace::LeastTaken(~0ull) == 256 * 1024);
}

void OneThatHasEndedDoesNotPause() {
  Stream stream;
  StreamPace pace(&stream);
  stream.waiting = kMost + 1;
  CHECK(pace.Look(kMost, 7, 0));
  pace.End();
  CHECK(!pace.is_paused() && stream.event_fd == -1 && pace.stalled_ns(1000) == 0);
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) void pytriton_guard_announce_response(uint64_t, bool) {}
__attribute__((visibility("default"))) void* pytriton_guard_take_stream() { return nullptr; }
__attribute__((visibility("default"))) uint64_t pytriton_guard_stream_waiting(const void* stream) {
  return static_cast<const Stream*>(stream)->waiting;
}
__attribute__((visibility("default"))) uint64_t pytriton_guard_stream_taken_bytes(void* stream) {
  return static_cast<const Stream*>(stream)->taken;
}
__attribute__((visibility("default"))) void pytriton_guard_wake_below(void* stream, uint64_t bytes, int event_fd) {
  static_cast<Stream*>(stream)->below = bytes;
  static_cast<Stream*>(stream)->event_fd = event_fd;
}
__attribute__((visibility("default"))) void pytriton_guard_drop_stream(void* stream) {
  static_cast<Stream*>(stream)->is_dropped = true;
}
}

int main() {
  OneWhoReadsNothingIsStalledFromThePause();
  OneWhoTricklesIsStalledAsWell();
  ThatLeastHasLimits();
  OneThatHasEndedDoesNotPause();
}
