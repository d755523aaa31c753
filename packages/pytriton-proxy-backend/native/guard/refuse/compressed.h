// Compressed requests: what they grow to, and the JSON in them.
#pragma once

#include <cstdint>

#include "../triton.h"

// The begin of zlib's z_stream, which has not changed since 1995.
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

// As zlib's inflate, which is `next`, called by the front end for HTTP.
int Inflate(z_stream_s* stream, int flush, int (*next)(z_stream_s*, int));

// What this thread has decompressed, and made no request of, stays in the server: that request has failed.
void ForgetDecompressed(Guard* guard);

// What this thread has decompressed belongs to this request from now on, which is about to be handed to Triton. Returns its
// bytes, for CountLeak where Triton does not take the request.
uint64_t ClaimDecompressed(const TRITONSERVER_InferenceRequest* request);

// Counts what Triton up to 2.68 keeps for ever of a compressed request that has failed.
void CountLeak(uint64_t bytes);

// Bytes that this thread has decompressed and made no request of so far.
uint64_t DecompressedBytes();

}  // namespace pytriton::guard
