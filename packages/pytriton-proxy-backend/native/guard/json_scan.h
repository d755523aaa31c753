// Follows a JSON text as its bytes pass, only as far as its depth and the number of its values are concerned: what a
// parser that builds a tree of it would need in stack and in memory. Says nothing about whether the text is valid.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pytriton::guard {

class JsonScan {
 public:
  // Reads on. False as soon as the text nests deeper than `max_depth`.
  bool Feed(const char* data, size_t size, uint64_t max_depth);

  // How many values there have been: each costs a tree a node.
  uint64_t values() const { return values_; }
  // How many members objects have had, over all of them.
  uint64_t members() const { return members_; }

 private:
  const char* SkipString(const char* data, const char* end);

  bool in_string_ = false;
  bool escaped_ = false;
  uint64_t depth_ = 0;
  uint64_t values_ = 0;
  uint64_t members_ = 0;
};

}  // namespace pytriton::guard
