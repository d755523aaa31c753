// Shared memory that callers register: which names they may use, and that each region has a file of its own.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace pytriton::guard {

// As shm_open. `is_for_caller`: a front end opens a region that a caller has named.
int OpenSharedMemory(const char* name, int flags, mode_t mode, bool is_for_caller);
// As mmap, for what a front end maps and shares.
void* MapSharedMemory(void* address, size_t length, int protection, int flags, int fd, off_t offset);

}  // namespace pytriton::guard
