// What a program or a server with the fake CUDA runtime can be asked and told. See fake_cuda.cc.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Of the functions that copy and make streams current and wait, the one that is called after `calls` others fails.
void fake_cuda_fail(int64_t calls, int error);
int64_t fake_cuda_calls();
// Streams, and pieces of memory, that were made and not given back.
int64_t fake_cuda_streams();
int64_t fake_cuda_allocations();
// How often a stream was waited for.
int64_t fake_cuda_synchronised();
// Called whenever somebody waits for a stream, before the wait; null for nothing.
void fake_cuda_while_waiting(void (*function)());
// Reads and writes memory of a device as it is now, whatever is queued.
void fake_cuda_read(const void* from, void* to, uint64_t size);
void fake_cuda_write(void* to, const void* from, uint64_t size);

int cudaMalloc(void** memory, size_t size);
int cudaFree(void* memory);
int cudaGetDevice(int* device);
int cudaSetDevice(int device);
}
