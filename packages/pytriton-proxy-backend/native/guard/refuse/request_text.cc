#include "request_text.h"

#include <cstring>

namespace pytriton::guard {

void RequestText::Add(const char* data, size_t size) {
  const char* const end = data + size;
  while (data < end && !is_cut_) {
    if (in_string_ && !escaped_ && string_bytes_ >= kMostOfString) {
      // Only the beginning of a long string is kept.
      while (data < end && *data != '"' && *data != '\\') ++data;
      if (data == end) return;
    }
    if (text_.size() >= kMost) {
      is_cut_ = true;
      return;
    }
    const char byte = *data++;
    if (in_string_) {
      AddToString(byte);
    } else {
      text_ += byte;
      in_string_ = byte == '"';
      string_bytes_ = 0;
    }
  }
}

void RequestText::AddToString(char byte) {
  const bool is_kept = string_bytes_ < kMostOfString;
  if (escaped_) {
    escaped_ = false;
    if (keeps_escape_) text_ += byte;
    ++string_bytes_;
  } else if (byte == '"') {
    in_string_ = false;
    text_ += byte;
  } else if (byte == '\\') {
    escaped_ = true;
    keeps_escape_ = is_kept;
    if (is_kept) text_ += byte;
  } else {
    ++string_bytes_;
    if (is_kept) text_ += byte;
  }
}

}  // namespace pytriton::guard
