// Makes foreign texts safe for a log: nothing in them may move the cursor, colour the terminal, or look like a line of
// ours. system/escapes.py has the same rule.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "utf8.h"

namespace pytriton {

// False for the controls of ASCII and Latin-1 except the tab (they include terminal sequences), for line separators,
// for what changes the direction of text, and for surrogates.
inline bool IsPrintable(uint32_t code) {
  if (code < 0x7f) return code >= 0x20 || code == '\t';
  return code > 0x9f && (code < 0x2028 || code > 0x202e) && (code < 0x2066 || code > 0x2069) &&
         !IsSurrogate(code);
}

// Returns a text as one line for a log, with escapes such as `
// ` or `\x1b` for what is not printable.
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
