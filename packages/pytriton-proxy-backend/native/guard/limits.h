// The guard's settings, `Limits`, as text; and the memory of the machine, for their defaults.
#pragma once

#include <cstdint>
#include <string>

#include "shared.h"

namespace pytriton::guard {

// Reads `name=value` pairs separated by commas, as in the variable PYTRITON_GUARD. Returns false with the reason for an
// unknown name or value; the pairs before it have been read then.
bool ParseLimits(const std::string& text, Limits* limits, std::string* error);

// The memory in bytes that this process may use: that of its container, or else of the machine.
uint64_t MemoryOfThisMachine();

// Bytes in a readable form: "3.0 GiB".
std::string Bytes(uint64_t bytes);

}  // namespace pytriton::guard
