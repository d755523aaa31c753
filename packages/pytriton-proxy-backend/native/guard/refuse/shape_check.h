// The bytes that an input asks for by its shape, before anybody takes memory for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pytriton::guard {

// Computes the bytes of an input: for texts the four that each element has at least. False, with the reason, for a
// negative dimension and for more bytes than can be counted. A data type that is not known counts as one byte.
bool BytesOfShape(const char* name, int data_type, const int64_t* shape, uint64_t dims_count, uint64_t* bytes,
                  std::string* error);

// "[1, 4]", shortened where it is long.
std::string ShapeText(const int64_t* shape, uint64_t dims_count);

// The name of an input as it may stand in an error.
std::string NameText(const char* name);

}  // namespace pytriton::guard
