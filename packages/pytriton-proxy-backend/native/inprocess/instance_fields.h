// Written by `python3 tools/dev.py reference` from
// `Instance` of inprocess/callables/backend.py and inprocess/requests/native_calls.py. Change that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../python/python_abi.h"

namespace pytriton {

struct Lane;

struct InstanceFields {
  void* slab;  // Address of the memory where the next batch is written.
  uint64_t capacity;  // Its bytes.
  uint64_t in_place_from;  // Inputs of so many bytes stay where they are if they can.
  uint64_t token;  // The number of the instance here.
  uint32_t batching;  // Whether tensors have a batch axis.
  uint32_t decoupled;  // Whether a request may get any number of responses.
  PyObject* owner;  // What keeps the slab, as long as it is the instance's.
  Lane* lane;  // That of plain batches; `None` where Python serves every batch.
  // What the answers of all models may take that are given again; 0 where those of this one are not.
  uint64_t cache_bytes;
  uint64_t cost_limit;  // What a batch may cost; 0 if that is not counted.
  uint64_t cost_overhead;  // What a batch costs by itself; 0 if that is to be found.
  uint64_t cost_alike;  // A bit for each input that is as long as the others which have one.
  uint32_t cost_packed;  // Whether inputs lie behind each other, and nothing is padded.
  uint32_t cost_alone;  // Whether a request that costs more is served by itself.
  uint32_t is_timed;  // Whether the callable has a batch for itself, so that the time that it takes is known.
};
static_assert(offsetof(InstanceFields, slab) == 0);
static_assert(offsetof(InstanceFields, capacity) == 8);
static_assert(offsetof(InstanceFields, in_place_from) == 16);
static_assert(offsetof(InstanceFields, token) == 24);
static_assert(offsetof(InstanceFields, batching) == 32);
static_assert(offsetof(InstanceFields, decoupled) == 36);
static_assert(offsetof(InstanceFields, owner) == 40);
static_assert(offsetof(InstanceFields, lane) == 48);
static_assert(offsetof(InstanceFields, cache_bytes) == 56);
static_assert(offsetof(InstanceFields, cost_limit) == 64);
static_assert(offsetof(InstanceFields, cost_overhead) == 72);
static_assert(offsetof(InstanceFields, cost_alike) == 80);
static_assert(offsetof(InstanceFields, cost_packed) == 88);
static_assert(offsetof(InstanceFields, cost_alone) == 92);
static_assert(offsetof(InstanceFields, is_timed) == 96);
static_assert(sizeof(InstanceFields) == 104);

// What happens to a request. Python is told in the thread in which it happens.
enum Event : uint32_t {
  kReleased = 1,  // Triton has no more need of the inputs; the request is still there.
  kResponded = 2,  // There is a response in the queue.
  kCompleted = 4,  // Triton has done with the request, and it is deleted.
};

// Flags of a response as Python gets it.
enum ResponseFlag : uint32_t {
  kFinal = 1,  // It is the last one.
  kCancelled = 2,  // The request was cancelled.
  kComplete = 4,  // The request has ended, and nothing more will be reported of it.
};

}  // namespace pytriton
