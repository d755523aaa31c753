#include "json_scan.h"

#include <cstring>

namespace pytriton::guard {

namespace {

// The server searches the members of an object one by one: 100,000 of them keep a thread busy for ten seconds.
constexpr uint64_t kMaxMembers = 16384;

// What a parser skips before a text: white space, and any part of a byte order mark.
bool IsBeforeText(char byte) { return byte != '\0' && std::strchr(" \t\r\n\xef\xbb\xbf", byte) != nullptr; }

// Sixteen bytes at once, in the syntax of GCC and clang.
using Block = uint8_t __attribute__((vector_size(16)));

constexpr Block Fill(uint8_t byte) {
  return Block{byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte};
}

}  // namespace

// Skips numbers and counts the commas between them. Returns where something else begins, or is near.
const char* JsonScan::SkipNumbers(const char* data, const char* end) {
  while (end - data >= static_cast<ptrdiff_t>(sizeof(Block))) {
    Block block;
    std::memcpy(&block, data, sizeof(block));
    // Brackets and braces differ by one bit.
    const Block folded = block | Fill(0x20);
    const Block other = reinterpret_cast<Block>((folded == Fill('{')) | (folded == Fill('}')) | (block == Fill('"')) |
                                                (block == Fill(':')));
    uint64_t halves[2];
    std::memcpy(halves, &other, sizeof(other));
    if ((halves[0] | halves[1]) != 0) return data;
    const Block commas = reinterpret_cast<Block>(block == Fill(',')) & Fill(1);
    std::memcpy(halves, &commas, sizeof(commas));
    // The sum of the bytes ends up in the highest one.
    values_ += ((halves[0] + halves[1]) * 0x0101010101010101u) >> 56;
    data += sizeof(Block);
  }
  return data;
}

bool JsonScan::Feed(const char* data, size_t size, uint64_t max_depth, std::string* problem) {
  const char* const end = data + size;
  if (part_ == Part::kBefore) {
    while (data < end && IsBeforeText(*data)) ++data;
    // Only arrays and objects can nest.
    if (data < end) part_ = *data == '[' || *data == '{' ? Part::kInside : Part::kBehind;
  }
  if (part_ != Part::kInside) return true;
  if (in_string_) data = SkipString(data, end);
  while (data < end) {
    switch (*data++) {
      case '[':
      case '{':
        ++values_;
        if (++depth_ > max_depth) {
          *problem = "the JSON of the request nests deeper than " + std::to_string(max_depth) +
                     " levels, the limit max_json_depth of the guard";
          return false;
        }
        break;
      case ']':
      case '}':
        if (--depth_ == 0) {
          part_ = Part::kBehind;
          return true;
        }
        break;
      case ':':
        ++values_;
        if (++members_ > kMaxMembers) {
          *problem = "the JSON of the request has more than " + std::to_string(kMaxMembers) + " members of objects";
          return false;
        }
        break;
      case ',':
        ++values_;
        data = SkipNumbers(data, end);
        break;
      case '"':
        in_string_ = true;
        data = SkipString(data, end);
        break;
      default:
        break;
    }
  }
  return true;
}

// Long parts of JSON are strings (images in base64), so they are skipped with memchr. `quote` is searched again only
// after the last one found; otherwise a text of many escapes would be searched once for each.
const char* JsonScan::SkipString(const char* data, const char* end) {
  if (escaped_ && data < end) {
    escaped_ = false;
    ++data;
  }
  const char* quote = data;
  while (data < end) {
    if (data >= quote) {
      quote = static_cast<const char*>(std::memchr(data, '"', static_cast<size_t>(end - data)));
      if (quote == nullptr) quote = end;
    }
    const auto* escape = static_cast<const char*>(std::memchr(data, '\\', static_cast<size_t>(quote - data)));
    if (escape == nullptr) {
      if (quote == end) return end;
      in_string_ = false;
      return quote + 1;
    }
    if (escape + 1 == end) {
      escaped_ = true;
      return end;
    }
    data = escape + 2;
    if (data > quote) quote = data;
  }
  return end;
}

}  // namespace pytriton::guard
