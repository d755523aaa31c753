// Follows a JSON text as its bytes pass, only as far as its depth and the number of its values are concerned: what a
// parser that builds a tree of it would need in stack and in memory. Says nothing about whether the text is valid.
//
// It looks at the first value alone: parsers go no further. So the tensors that may follow a JSON text are not looked
// at, whoever says where that text ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pytriton::guard {

// What a node of a tree of JSON takes: 16 bytes, which lie on a stack of the parser first and are copied from there.
constexpr uint64_t kBytesPerJsonValue = 32;

class JsonScan {
 public:
  // Reads on. False, with the reason, as soon as the text nests deeper than `max_depth` or has too many members.
  bool Feed(const char* data, size_t size, uint64_t max_depth, std::string* problem);

  // How many values there have been: each costs a tree a node.
  uint64_t values() const { return values_; }

  // Whether the texts in so many bytes of JSON may take more than the server can count, which it does in 32 bits with a
  // sign. Each takes four bytes more in a tensor than it has letters, and in JSON two quotes and a comma.
  bool MayOverflow(uint64_t size) const { return size + values_ > INT32_MAX; }

 private:
  enum class Part { kBefore, kInside, kBehind };

  const char* SkipNumbers(const char* data, const char* end);
  const char* SkipString(const char* data, const char* end);

  Part part_ = Part::kBefore;
  bool in_string_ = false;
  bool escaped_ = false;
  uint64_t depth_ = 0;
  uint64_t values_ = 0;
  uint64_t members_ = 0;
};

}  // namespace pytriton::guard
