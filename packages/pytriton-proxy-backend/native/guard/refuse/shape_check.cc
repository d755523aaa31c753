#include "shape_check.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "../../proxy/text/printable.h"
#include "../../proxy/wire/shared_limits.h"

namespace pytriton::guard {

namespace {

uint64_t BytesOfElement(int data_type) {
  const auto type = static_cast<uint32_t>(data_type);
  if (type == kBytesType) return sizeof(uint32_t);  // the length prefix of a text
  return type < std::size(kElementSizes) ? std::max<uint64_t>(kElementSizes[type], 1) : 1;
}

}  // namespace

bool BytesOfShape(const char* name, int data_type, const int64_t* shape, uint64_t dims_count, uint64_t* bytes,
                  std::string* error) {
  // If the model batches, the first dimension is the number of rows, which Triton counts in 32 bits.
  if (dims_count > 0 && shape[0] > INT32_MAX) {
    *error = "input '" + NameText(name) + "' has the shape " + ShapeText(shape, dims_count) +
             ", and a first dimension may be 2147483647 at most";
    return false;
  }
  bool is_empty = false;
  for (uint64_t i = 0; i < dims_count; ++i) {
    if (shape[i] < 0) {
      *error = "input '" + NameText(name) + "' has the shape " + ShapeText(shape, dims_count) +
               ", and no dimension of a request may be negative";
      return false;
    }
    is_empty = is_empty || shape[i] == 0;
  }
  *bytes = BytesOfElement(data_type);
  bool overflows = false;
  for (uint64_t i = 0; i < dims_count; ++i) {
    // Triton multiplies in the order of the dimensions, so a zero after an overflow does not undo it.
    const uint64_t dim = shape[i] == 0 ? 1 : static_cast<uint64_t>(shape[i]);
    overflows = overflows || __builtin_mul_overflow(*bytes, dim, bytes);
  }
  if (overflows || *bytes > INT64_MAX) {
    *error = "input '" + NameText(name) + "' has the shape " + ShapeText(shape, dims_count) +
             ", whose bytes are more than can be counted";
    return false;
  }
  if (is_empty) *bytes = 0;
  return true;
}

std::string ShapeText(const int64_t* shape, uint64_t dims_count) {
  constexpr uint64_t kMost = 16;
  std::string text = "[";
  for (uint64_t i = 0; i < dims_count && i < kMost; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + (dims_count > kMost ? ", ...]" : "]");
}

std::string NameText(const char* name) {
  constexpr size_t kMost = 80;
  const std::string_view text(name == nullptr ? "" : name, name == nullptr ? 0 : strnlen(name, kMost + 1));
  return Printable(text.substr(0, kMost)) + (text.size() > kMost ? "..." : "");
}

}  // namespace pytriton::guard
