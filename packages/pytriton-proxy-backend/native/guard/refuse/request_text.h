// The JSON of a request to `generate`, which is kept until Triton has taken the request; if Triton refuses it, the text
// is used to explain the error. Of a long string, such as an image in base64, only the beginning is kept.
#pragma once

#include <cstddef>
#include <string>

namespace pytriton::guard {

class RequestText {
 public:
  // At most so many bytes are kept.
  static constexpr size_t kMost = 256 * 1024;
  // At most so many bytes of each string are kept.
  static constexpr size_t kMostOfString = 200;

  void Add(const char* data, size_t size);

  const std::string& text() const { return text_; }
  // Whether a part was not kept.
  bool is_cut() const { return is_cut_; }
  // The memory that it takes, in bytes.
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
