// The memory that callers share with the server, which maps it from their files.
//
// The owner of such a file may make it shorter at any time. Whoever then touches the mapping behind the new end, to
// read an input or write an output, gets SIGBUS, which ends the process. So each tensor in such memory is checked
// before it is used. If a file becomes shorter after the check, the place gets other memory, and its region is not used
// any more.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace pytriton::guard {

// To be called for every region that is mapped or unmapped.
void AddSharedMapping(void* address, size_t length);
void RemoveSharedMapping(void* address, size_t length);

// Describes what is wrong with a place in such memory; "" if it can be used, and for memory of any other kind.
std::string CheckSharedMemory(const void* base, size_t size);

// Replaces the memory at a place in a region that cannot be touched. Returns false if the place lies in no region. For
// a signal handler.
bool MendSharedMemory(const void* address);

// Makes SIGBUS mend the regions; outside of them, it does what it did before.
void HandleSharedMemoryFaults();

}  // namespace pytriton::guard
