// Ends the streams of callers that have gone, a while after they went.
//
// Triton 2.51 answers a cancelled gRPC stream in two threads that get into each other's way: where the last response of a
// stream comes while the other thread is still at the cancellation, the server crashes, or stops for good with a lock
// held, or never lets go of the request. So nothing is sent for a stream once it is cancelled, and its end only when
// that thread has long finished.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "triton_api.h"

namespace pytriton {

constexpr uint64_t kLateEndNs = 250 * 1000 * 1000;

class LateEnds {
 public:
  // `wake` makes whoever calls SendDue do so.
  explicit LateEnds(std::function<void()> wake) : wake_(std::move(wake)) {}
  ~LateEnds();
  LateEnds(const LateEnds&) = delete;
  LateEnds& operator=(const LateEnds&) = delete;

  // Takes over the factory of a cancelled stream.
  void Add(TRITONBACKEND_ResponseFactory* factory);
  // Sends what is due, and returns when the next one is; UINT64_MAX where there is none.
  uint64_t SendDue(uint64_t now_ns);

 private:
  struct End {
    TRITONBACKEND_ResponseFactory* factory;
    uint64_t due_ns;
  };

  static void Send(const End& end);

  const std::function<void()> wake_;
  std::mutex mutex_;
  std::vector<End> ends_;
};

// Requests that Python models make of others. Whoever cancels one of these still takes what comes for it: no stream of a
// front end is behind it.
class InnerRequests {
 public:
  static void Add(const void* request);
  static void Remove(const void* request);
  static bool Has(const void* request);
};

}  // namespace pytriton
