#include "compressed.h"

#include <string>
#include <utility>

#include "../in_force.h"
#include "../protections.h"
#include "json_scan.h"
#include "memory.h"
#include "refusals.h"

namespace pytriton::guard {
namespace {

constexpr int kStreamError = -2;  // Z_STREAM_ERROR

// What this thread has decompressed, until it becomes a request.
struct Decompression {
  const z_stream_s* stream = nullptr;
  JsonScan json;
  uint64_t bytes = 0;    // bytes of decompressed data
  uint64_t charged = 0;  // of these, those counted in the memory in flight
};
thread_local Decompression t_decompression;

}  // namespace

int Inflate(z_stream_s* stream, int flush, int (*next)(z_stream_s*, int)) {
  Guard* const guard = Refusing();
  if (guard == nullptr) return next(stream, flush);
  if (t_reads_http) Reach(Protection::kCompressedBodies);
  const unsigned long before = stream->total_out;
  const auto* out = reinterpret_cast<const char*>(stream->next_out);
  const int result = next(stream, flush);
  if (stream->total_out > guard->limits.max_request_bytes) {
    LogRefusal("a compressed message has more than " + std::to_string(guard->limits.max_request_bytes) +
               " bytes, the limit max_request_bytes of the guard");
    return kStreamError;
  }
  // The front end for gRPC decompresses in threads of its own, and frees the memory.
  if (!t_reads_http) return result;
  if (before == 0 || t_decompression.stream != stream) {
    ForgetDecompressed(guard);
    t_decompression.stream = stream;
  }
  JsonScan& json = t_decompression.json;
  t_decompression.bytes = stream->total_out;
  std::string problem;
  if (!json.Feed(out, static_cast<size_t>(stream->total_out - before), guard->limits.max_json_depth, &problem) ||
      json.MayOverflow(stream->total_out)) {
    LogRefusal(problem.empty() ? "a compressed request has more values than the server can count" : problem);
    return kStreamError;
  }
  const uint64_t needed = stream->total_out + json.values() * kBytesPerJsonValue;
  if (needed > kSmall && needed > t_decompression.charged) {
    if (!guard->inputs.TryReserve(needed - t_decompression.charged, guard->limits.max_in_flight_bytes)) {
      LogRefusal("a compressed request needs more memory than max_in_flight_bytes of the guard leaves");
      return kStreamError;
    }
    t_decompression.charged = needed;
  }
  return result;
}

void ForgetDecompressed(Guard* guard) {
  if (t_decompression.stream == nullptr) return;
  CountLeak(t_decompression.bytes);
  guard->inputs.Release(t_decompression.charged);
  t_decompression = {};
}

uint64_t ClaimDecompressed(const TRITONSERVER_InferenceRequest* request) {
  const uint64_t charged = std::exchange(t_decompression.charged, 0);
  // This comes before the call, because the request may be gone after it.
  if (charged > 0) large_requests().Add(request, charged);
  return std::exchange(t_decompression.bytes, 0);
}

void CountLeak(uint64_t bytes) {
  if (Guard* const guard = Active(); guard != nullptr && bytes > 0) guard->leaked.fetch_add(bytes);
}

uint64_t DecompressedBytes() { return t_decompression.bytes; }

}  // namespace pytriton::guard
