// Written by `python3 tools/dev.py reference` from wire/limits.py, wire/dtypes.py and wire/layout.py. Change those.
#pragma once

#include <cstdint>

namespace pytriton {

// Batches with a tensor of more dimensions are served by Python, not by the accelerator.
constexpr int kAcceleratedDims = 8;
// Metadata of a record is compared with that of earlier records up to so many bytes.
constexpr uint64_t kComparedBytes = 65536;
// Outputs up to so many bytes are copied, which costs less than to send them from where they are.
constexpr uint64_t kLargestCopiedBytes = 2097152;
// Payloads of a record up to so many bytes are copied without letting other threads run meanwhile.
constexpr uint64_t kSmallRecordBytes = 65536;
// A response up to so many bytes may be acknowledged with the next batch, a larger one is at once.
constexpr uint64_t kAcknowledgedLaterBytes = 65536;
// Triton's number of BYTES.
constexpr uint32_t kBytesType = 13;
// Bytes of one element by Triton's number of its type; 0 where strings have a length each, and for no type.
constexpr uint8_t kElementSizes[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 2};
// The largest number of a type of parameters.
constexpr uint32_t kLastParameterType = 3;

}  // namespace pytriton
