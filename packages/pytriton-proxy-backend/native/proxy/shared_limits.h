// Written by `python3 tools/dev.py reference` from wire/limits.py, wire/dtypes.py and wire/layout.py. Change those.
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
// Triton's number of BYTES.
constexpr uint32_t kBytesType = 13;
// Bytes of one element by Triton's number of its type; 0 where strings have a length each, and for no type.
constexpr uint8_t kElementSizes[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 2};
// The largest number of a type of parameters.
constexpr uint32_t kLastParameterType = 3;

}  // namespace pytriton
