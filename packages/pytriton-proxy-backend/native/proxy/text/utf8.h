// Texts in UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pytriton {

// The first character of a text and its length in bytes; if the text does not begin with UTF-8, an invalid one of one
// byte.
struct Character {
  size_t bytes = 1;
  uint32_t code = 0;
  bool is_valid = false;
};

inline Character FirstCharacter(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return {1, byte(0), true};
  const size_t size = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || text.size() < size) return {};
  uint32_t code = byte(0) & (0xffu >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3fu);
  }
  const bool is_too_long = (size == 3 && code < 0x800) || (size == 4 && code < 0x10000);
  if (is_too_long || code > 0x10ffff) return {};
  return {size, code, true};
}

// Whether a code is a surrogate, that is, half of a pair, which stands for no character by itself.
inline bool IsSurrogate(uint32_t code) { return code >= 0xd800 && code <= 0xdfff; }

// How many bytes at the beginning are UTF-8 without surrogates.
inline size_t Utf8Prefix(std::string_view text) {
  size_t good = 0;
  while (good < text.size()) {
    const Character first = FirstCharacter(text.substr(good));
    if (!first.is_valid || IsSurrogate(first.code)) break;
    good += first.bytes;
  }
  return good;
}

// Whether protobuf accepts these bytes as a string.
inline bool IsUtf8(std::string_view text) { return Utf8Prefix(text) == text.size(); }

}  // namespace pytriton
