// Compressed requests: limits what they grow to, and examines the JSON in them.
#pragma once

#include <cstdint>

#include "../triton.h"

// The beginning of zlib's z_stream, which has not changed since 1995.
struct z_stream_s {
  unsigned char* next_in;
  unsigned avail_in;
  unsigned long total_in;
  unsigned char* next_out;
  unsigned avail_out;
  unsigned long total_out;
};

namespace pytriton::guard {

struct Guard;

// Works like zlib's inflate, which is `next`, for the HTTP front end.
int Inflate(z_stream_s* stream, int flush, int (*next)(z_stream_s*, int));

// To be called when decompressed data did not become a request. The server keeps the data, because that request has
// failed.
void ForgetDecompressed(Guard* guard);

// Assigns what this thread has decompressed to a request that is about to be handed to Triton. Returns the bytes, for
// CountLeak if Triton refuses the request.
uint64_t ClaimDecompressed(const TRITONSERVER_InferenceRequest* request);

// Counts the memory that Triton up to 2.68 never frees after a compressed request has failed.
void CountLeak(uint64_t bytes);

// Bytes that this thread has decompressed and that have not become a request.
uint64_t DecompressedBytes();

}  // namespace pytriton::guard
