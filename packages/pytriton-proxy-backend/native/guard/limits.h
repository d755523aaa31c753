// The settings of the guard, `Limits`, as text; and the memory that they are about.
#pragma once

#include <cstdint>
#include <string>

#include "shared.h"

namespace pytriton::guard {

// Reads `name=value` pairs with commas between them, as in the variable PYTRITON_GUARD. False, with the reason, for a
// name or a value that is not known; what stands before it has been read then.
bool ParseLimits(const std::string& text, Limits* limits, std::string* error);

// The memory that this process may use, in bytes: that of its container, else of the machine.
uint64_t MemoryOfThisMachine();

// Bytes as a person reads them: "3.0 GiB".
std::string Bytes(uint64_t bytes);

}  // namespace pytriton::guard
