// The memory that callers share with the server, which it maps from files of theirs.
//
// Whoever owns such a file may make it shorter at any time; whatever touches the mapping behind the new end of the file
// then, to read an input or to write an output, gets SIGBUS, which ends the process. So each tensor that lies in such
// memory is looked at before it is used; and where a file is made shorter in that very moment, the place gets other memory,
// and its region is not used any more.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace pytriton::guard {

// Is told of every region that is mapped and unmapped.
void AddSharedMapping(void* address, size_t length);
void RemoveSharedMapping(void* address, size_t length);

// Says what is wrong with a place in such memory; empty for one that can be used, and for memory of any other kind.
std::string CheckSharedMemory(const void* base, size_t size);

// Gives other memory to a place in a region that cannot be touched; false where it lies in none. For a signal handler.
bool MendSharedMemory(const void* address);

// Has SIGBUS mend the regions; outside of them, it does what it did.
void HandleSharedMemoryFaults();

}  // namespace pytriton::guard
