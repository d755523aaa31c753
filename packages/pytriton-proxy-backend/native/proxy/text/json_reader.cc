#include "json_reader.h"

#include <cstdint>
#include <cstdio>

#include "utf8.h"

namespace pytriton {
namespace {

bool IsBlank(char byte) { return byte == ' ' || byte == '\t' || byte == '\r' || byte == '\n'; }

void AppendUtf8(uint32_t code, std::string* text) {
  const auto append = [text](uint32_t byte) { text->push_back(static_cast<char>(byte)); };
  if (code < 0x80) return append(code);
  if (code < 0x800) {
    append(0xc0 | code >> 6);
  } else if (code < 0x10000) {
    append(0xe0 | code >> 12);
    append(0x80 | (code >> 6 & 0x3f));
  } else {
    append(0xf0 | code >> 18);
    append(0x80 | (code >> 12 & 0x3f));
    append(0x80 | (code >> 6 & 0x3f));
  }
  append(0x80 | (code & 0x3f));
}

}  // namespace

char JsonReader::Next() {
  while (at_ < text_.size() && IsBlank(text_[at_])) ++at_;
  return at_ < text_.size() ? text_[at_] : '\0';
}

bool JsonReader::Take(char expected) {
  if (Next() != expected) return false;
  ++at_;
  return true;
}

int JsonReader::Hexadecimal(size_t at) const {
  if (at > text_.size() || text_.size() - at < 4) return -1;
  int value = 0;
  for (const char digit : text_.substr(at, 4)) {
    const int lower = digit | 0x20;
    if (digit >= '0' && digit <= '9') {
      value = value * 16 + (digit - '0');
    } else if (lower >= 'a' && lower <= 'f') {
      value = value * 16 + (lower - 'a' + 10);
    } else {
      return -1;
    }
  }
  return value;
}

bool JsonReader::String(std::string* read) {
  if (Next() != '"') return false;
  const size_t begin = at_ + 1;
  if (!PassString()) return false;
  const size_t end = at_ - 1;
  read->clear();
  for (size_t at = begin; at < end; ++at) {
    if (text_[at] != '\\') {
      read->push_back(text_[at]);
      continue;
    }
    constexpr std::string_view kEscapes = "bfnrt";
    constexpr std::string_view kMeant = "\b\f\n\r\t";
    const char escape = text_[++at];
    const size_t plain = kEscapes.find(escape);
    if (escape != 'u') {
      read->push_back(plain == std::string_view::npos ? escape : kMeant[plain]);
      continue;
    }
    int code = at + 4 < end ? Hexadecimal(at + 1) : -1;
    if (code < 0) {
      read->push_back('?');
      continue;
    }
    at += 4;
    if (code >= 0xd800 && code < 0xdc00 && at + 6 < end && text_[at + 1] == '\\' && text_[at + 2] == 'u') {
      const int low = Hexadecimal(at + 3);
      if (low >= 0xdc00 && low < 0xe000) {
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        at += 6;
      }
    }
    if (IsSurrogate(static_cast<uint32_t>(code))) {
      read->push_back('?');
    } else {
      AppendUtf8(static_cast<uint32_t>(code), read);
    }
  }
  return true;
}

bool JsonReader::PassString() {
  for (++at_; at_ < text_.size(); ++at_) {
    if (text_[at_] == '"') {
      ++at_;
      return true;
    }
    if (text_[at_] == '\\') ++at_;
  }
  at_ = text_.size();
  return false;
}

bool JsonReader::Value(std::string_view* value) {
  Next();
  const size_t begin = at_;
  uint64_t depth = 0;
  while (at_ < text_.size()) {
    const char byte = text_[at_];
    if (byte == '"') {
      if (!PassString()) return false;
      if (depth == 0) break;
    } else if (byte == '[' || byte == '{') {
      ++depth;
      ++at_;
    } else if (byte == ']' || byte == '}') {
      // This bracket closes what the value stands in, so it does not belong to the value.
      if (depth == 0) break;
      ++at_;
      if (--depth == 0) break;
    } else if (depth == 0 && (byte == ',' || byte == ':' || IsBlank(byte))) {
      break;
    } else {
      ++at_;
    }
  }
  *value = text_.substr(begin, at_ - begin);
  // If the text was cut off, its last value may be incomplete, so a value at the very end does not count.
  return !value->empty() && at_ < text_.size();
}

std::string_view JsonMember(std::string_view object, std::string_view name) {
  std::string_view found;
  JsonReader(object).Object([&](const std::string& member, std::string_view value) {
    if (member == name) found = value;
  });
  return found;
}

std::string JsonString(std::string_view text) {
  std::string made = "\"";
  while (!text.empty()) {
    const Character first = FirstCharacter(text);
    if (!first.is_valid || IsSurrogate(first.code)) {
      made += '?';
    } else if (first.code == '"' || first.code == '\\') {
      made += '\\';
      made += text[0];
    } else if (first.code < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(first.code));
      made += escape;
    } else {
      made += text.substr(0, first.bytes);
    }
    text.remove_prefix(first.bytes);
  }
  return made + '"';
}

}  // namespace pytriton
