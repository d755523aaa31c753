// Follows the bytes of a JSON text to find its depth and the number of its values, that is, the stack and the memory
// that a parser with a tree would need. It does not check whether the text is valid.
//
// It examines only the first value, like parsers do. So tensors that may follow a JSON text are not examined, whoever
// says where the text ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pytriton::guard {

// What a node in a tree of JSON takes: 16 bytes, which first lie on the parser's stack and are copied from there.
constexpr uint64_t kBytesPerJsonValue = 32;

class JsonScan {
 public:
  // Reads on. Returns false with the reason as soon as the text nests deeper than `max_depth` or has too many members.
  bool Feed(const char* data, size_t size, uint64_t max_depth, std::string* problem);

  // The number of values so far; each takes a node of the tree.
  uint64_t values() const { return values_; }

  // Whether the texts in so many bytes of JSON may take more than the server can count in signed 32 bits. In a tensor,
  // each text takes four bytes besides its letters; in JSON, two quotes and a comma.
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
