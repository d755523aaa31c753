// Shared memory that callers register: checks the names, and that each region has a file of its own.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace pytriton::guard {

// Works like shm_open. With `is_for_caller`, a front end opens a region that a caller has named.
int OpenSharedMemory(const char* name, int flags, mode_t mode, bool is_for_caller);
// Works like mmap, for what a front end maps as shared.
void* MapSharedMemory(void* address, size_t length, int protection, int flags, int fd, off_t offset);

}  // namespace pytriton::guard
