// Computes the bytes that an input needs according to its shape, before anybody allocates them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pytriton::guard {

// Computes the bytes of an input; for texts, the four bytes that each element has at least. Returns false with the
// reason for a negative dimension and for an overflow. An unknown data type counts as one byte.
bool BytesOfShape(const char* name, int data_type, const int64_t* shape, uint64_t dims_count, uint64_t* bytes,
                  std::string* error);

// Formats a shape as "[1, 4]", shortened if it is long.
std::string ShapeText(const int64_t* shape, uint64_t dims_count);

// Makes the name of an input safe for an error.
std::string NameText(const char* name);

}  // namespace pytriton::guard
