// Ends the streams of callers that have left, some time later.
//
// Triton 2.51 answers a cancelled gRPC stream in two threads that race with each other: if the last response of a
// stream comes while the other thread handles the cancellation, the server crashes, or hangs with a lock held, or never
// releases the request. So nothing is sent for a cancelled stream, and its end is sent only when that thread has long
// finished.
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
  // `wake` makes the thread that calls SendDue call it soon.
  explicit LateEnds(std::function<void()> wake) : wake_(std::move(wake)) {}
  ~LateEnds();
  LateEnds(const LateEnds&) = delete;
  LateEnds& operator=(const LateEnds&) = delete;

  // Takes over the factory of a cancelled stream.
  void Add(TRITONBACKEND_ResponseFactory* factory);
  // Sends what is due. Returns when the next one is due; UINT64_MAX if there is none.
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

// Requests that Python models make of other models. If one of these is cancelled, its caller still takes the responses,
// because no stream of a front end is involved.
class InnerRequests {
 public:
  static void Add(const void* request);
  static void Remove(const void* request);
  static bool Has(const void* request);
};

}  // namespace pytriton
