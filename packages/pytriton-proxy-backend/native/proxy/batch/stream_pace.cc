#include "stream_pace.h"

#include <dlfcn.h>

namespace pytriton {

namespace {

template <typename Function>
Function Find(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

struct GuardResponses {
  void (*const begin)() = Find<void (*)()>("pytriton_guard_begin_responses");
  void (*const end)() = Find<void (*)()>("pytriton_guard_end_responses");
};

const GuardResponses& Responses() {
  static const GuardResponses responses;
  return responses;
}

// The functions of the guard; empty without a guard, or with an older one.
struct GuardStreams {
  void (*const announce)(uint64_t, bool) = Find<void (*)(uint64_t, bool)>("pytriton_guard_announce_response");
  void* (*const take)() = Find<void* (*)()>("pytriton_guard_take_stream");
  uint64_t (*const waiting)(const void*) = Find<uint64_t (*)(const void*)>("pytriton_guard_stream_waiting");
  uint64_t (*const taken)(void*) = Find<uint64_t (*)(void*)>("pytriton_guard_stream_taken_bytes");
  void (*const wake_below)(void*, uint64_t, int) =
      Find<void (*)(void*, uint64_t, int)>("pytriton_guard_wake_below");
  void (*const drop)(void*) = Find<void (*)(void*)>("pytriton_guard_drop_stream");

  bool is_there() const {
    return announce != nullptr && take != nullptr && waiting != nullptr && taken != nullptr && wake_below != nullptr &&
           drop != nullptr;
  }
};

const GuardStreams& Guard() {
  static const GuardStreams streams;
  return streams;
}

}  // namespace

void AnnounceResponse(uint64_t bytes, bool wants_stream) {
  if (Guard().is_there()) Guard().announce(bytes, wants_stream);
}

SentTogether::SentTogether() {
  if (Responses().begin != nullptr && Responses().end != nullptr) Responses().begin();
}

SentTogether::~SentTogether() {
  if (Responses().begin != nullptr && Responses().end != nullptr) Responses().end();
}

void* TakeStream() { return Guard().is_there() ? Guard().take() : nullptr; }

StreamPace::~StreamPace() {
  Guard().wake_below(stream_, 0, -1);
  Guard().drop(stream_);
}

void StreamPace::End() {
  if (is_paused_) Guard().wake_below(stream_, 0, -1);
  is_paused_ = false;
}

bool StreamPace::Look(uint64_t most, int wake_fd, uint64_t now_ns) {
  const uint64_t waiting = Guard().waiting(stream_);
  if (!is_paused_) {
    if (waiting <= most) return false;
    is_paused_ = true;
    taken_ = Guard().taken(stream_);
    since_ns_ = now_ns;
    Guard().wake_below(stream_, most / 2, wake_fd);
  } else if (waiting <= most / 2) {
    is_paused_ = false;
  } else if (const uint64_t taken = Guard().taken(stream_); taken - taken_ >= LeastTaken(most)) {
    taken_ = taken;
    since_ns_ = now_ns;
  }
  return is_paused_;
}

}  // namespace pytriton
