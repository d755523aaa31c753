// The JSON of a request to `generate`, kept until it is known whether Triton takes it: to say what is wrong with it, where
// Triton does not. What is long in such a text, an image in base64, is kept as its begin.
#pragma once

#include <cstddef>
#include <string>

namespace pytriton::guard {

class RequestText {
 public:
  // More of it than this is not kept.
  static constexpr size_t kMost = 256 * 1024;
  // The most bytes that are kept of each string.
  static constexpr size_t kMostOfString = 200;

  void Add(const char* data, size_t size);

  const std::string& text() const { return text_; }
  // Whether more came than is kept.
  bool is_cut() const { return is_cut_; }
  // Bytes that it takes.
  size_t memory() const { return text_.capacity(); }

 private:
  void AddToString(char byte);

  std::string text_;
  bool is_cut_ = false;
  bool in_string_ = false;
  bool escaped_ = false;
  bool keeps_escape_ = false;
  size_t string_bytes_ = 0;
};

}  // namespace pytriton::guard
