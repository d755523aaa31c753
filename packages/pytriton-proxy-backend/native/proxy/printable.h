// Texts of others in a log: nothing in them moves a cursor, colours a terminal, or looks like a line of our own.
// The same rule as in system/escapes.py.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "utf8.h"

namespace pytriton {

// Controls of ASCII and of Latin-1 (with the sequences of terminals) but for the tab, separators of lines, what changes the
// direction of what follows, and halves of surrogate pairs.
inline bool IsPrintable(uint32_t code) {
  if (code < 0x7f) return code >= 0x20 || code == '\t';
  return code > 0x9f && (code < 0x2028 || code > 0x202e) && (code < 0x2066 || code > 0x2069) &&
         !IsSurrogate(code);
}

// A text that is one line of a log, with an escape such as `\n` or `\x1b` for whatever would be more.
inline std::string Printable(std::string_view text) {
  std::string made;
  made.reserve(text.size());
  while (!text.empty()) {
    const Character first = FirstCharacter(text);
    if (first.is_valid && IsPrintable(first.code)) {
      made += text.substr(0, first.bytes);
    } else if (first.is_valid && (first.code == '\n' || first.code == '\r')) {
      made += first.code == '\n' ? "\\n" : "\\r";
    } else {
      char escape[8];
      const unsigned code = first.is_valid ? first.code : static_cast<unsigned char>(text[0]);
      std::snprintf(escape, sizeof(escape), code < 0x100 ? "\\x%02x" : "\\u%04x", code);
      made += escape;
    }
    text.remove_prefix(first.bytes);
  }
  return made;
}

}  // namespace pytriton
