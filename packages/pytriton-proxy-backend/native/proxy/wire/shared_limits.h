// Written by `python3 tools/dev.py reference` from
// wire/limits.py, wire/dtypes.py, wire/layout.py, settings.py and hosting/control.py. Change that.
#pragma once

#include <cstdint>

namespace pytriton {

// Batches with a tensor of more dimensions are served by Python, not by the accelerator.
constexpr int kAcceleratedDims = 8;
// Larger metadata of a record is not compared with that of earlier records.
constexpr uint64_t kComparedBytes = 65536;
// Larger outputs are sent from where they are; copying smaller ones costs less.
constexpr uint64_t kLargestCopiedBytes = 2097152;
// Larger payloads of a record are copied without the GIL, so that other threads can run.
constexpr uint64_t kSmallRecordBytes = 65536;
// A larger response is acknowledged at once, a smaller one possibly with the next batch.
constexpr uint64_t kAcknowledgedLaterBytes = 65536;
constexpr int kMaxInFlight = 1024;  // A worker has no more batches at once, whatever its greeting asks for.
// The first segment of an arena has at least so many; it is kept when the arena is idle.
constexpr uint64_t kFirstSegmentBytes = 1048576;
// Whoever has no room in its arena waits so long for blocks that the other side gives back.
constexpr uint64_t kArenaTimeoutNs = 30000000000;
// An arena has no more segments at once; a peer that announces more is disconnected.
constexpr int kMaxSegments = 4096;
// The powers of two by which a worker counts sizes and times: a 64-bit integer has at most 64 bits.
constexpr int kCountedBuckets = 65;
constexpr int kCountedParts = 4;  // Each power of two of a time has so many buckets of equal width.
// The library in tritonserver and the supervisor of hosts send each other no larger frames.
constexpr uint64_t kMaxFrameBytes = 67108864;
// Without a worker a batch waits so long before it is set aside, while Triton collects the next one.
constexpr uint64_t kCollectNs = 20000000;
// After that, batches are set aside at once for so long, which empties Triton's queue.
constexpr uint64_t kDrainNs = 5000000;
// A model may be without a worker for so long before it says that it is not ready.
constexpr uint64_t kReadyGraceNs = 500000000;
// A worker with several batches that sends nothing for so long is dropped when one of them has taken too long.
constexpr uint64_t kSilenceNs = 1000000000;
// A part of the text of an error, by which the guard tells what Triton has no code of its own for.
constexpr char kTimeLimitText[] = "took longer for this request than the model's execution timeout";
constexpr char kWorkerLostText[] = "was lost while it worked on this request";  // Another one.
// Name of the file in the folder of a model version that holds its `ProxySettings`.
constexpr char kSideFileName[] = "pytriton.conf";
// Name of the file beside the library as the backend of Python models: where it asks for their processes.
constexpr char kHostsFileName[] = "pytriton-hosts.conf";
// Environment variable of a tritonserver: the path of such a file, which counts for all models, converted ones too.
constexpr char kHostsVariable[] = "PYTRITON_HOSTS_FILE";
constexpr char kDescriptionName[] = "pytriton.json";  // Name of the copy in the version folder of a drop-in model.
// Triton's numbers of some types.
constexpr uint32_t kBytesType = 13;
constexpr uint32_t kFp64Type = 12;
// The names of the types, by Triton's number.
constexpr const char* kTypeNames[] = {
    "no type", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16"};
// Bytes of one element by Triton's number of its type; 0 where strings have a length each, and for no type.
constexpr uint8_t kElementSizes[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 2};
// The largest number of a type of parameters.
constexpr uint32_t kLastParameterType = 3;

// The kinds of frames between the library and the supervisor of hosts.
enum class FrameKind : uint16_t {
  // Model, version, its folder, its configuration as JSON, the command line's settings of the backend as JSON, "1"
  // where the configuration is to be completed, name and folder of the backend. Answered with the completed
  // configuration, or nothing, and the text of a side file, whose endpoint those of the instances begin with.
  kModel = 1,
  // The model's endpoint, the instance's name, its kind, its device, its endpoint. Answered when `initialize` is
  // over. Nothing else is sent on the connection: its writing end is shut down when the instance is to finish.
  kInstance = 2,
  kOk = 100,  // The answer to either: it succeeded.
  kError = 101,  // The other answer, with the text of the load error.
};

}  // namespace pytriton
