// The part of protobuf's wire format that the messages of inference need. No I/O, no memory of its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace pytriton::grpc {

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kGroup = 3, kGroupEnd = 4, kFixed32 = 5 };

// How deep groups may nest, as in all implementations of protobuf.
constexpr size_t kMostNesting = 100;

// Walks through the fields of a message.
class FieldReader {
 public:
  explicit FieldReader(std::string_view message) : place_(message.data()), end_(message.data() + message.size()) {}

  // Goes to the next field. Returns false at the end, or if the message is malformed: see `ok`.
  bool Next() {
    if (place_ == end_) return false;
    if (ReadTag() && (type_ == kGroup ? SkipGroup() : ReadContent())) return true;
    ok_ = false;
    place_ = end_;
    return false;
  }

  uint32_t number() const { return number_; }
  bool Is(uint32_t number, WireType type) const { return number_ == number && type_ == type; }
  uint64_t value() const { return value_; }
  std::string_view bytes() const { return bytes_; }
  bool ok() const { return ok_; }

  // Reads one number of a packed field. Returns false at the end, or if it is malformed.
  bool ReadVarint(uint64_t* value, int most_bytes = 10) {
    uint64_t result = 0;
    for (int shift = 0; shift < 7 * most_bytes && place_ < end_; shift += 7) {
      const auto byte = static_cast<unsigned char>(*place_++);
      result |= static_cast<uint64_t>(byte & 127) << shift;
      if ((byte & 128) == 0) {
        *value = result;
        return true;
      }
    }
    return false;
  }
  bool at_end() const { return place_ == end_; }

 private:
  bool ReadTag() {
    constexpr int kMostTagBytes = 5;
    uint64_t tag = 0;
    if (!ReadVarint(&tag, kMostTagBytes) || tag > UINT32_MAX || tag >> 3 == 0) return false;
    number_ = static_cast<uint32_t>(tag >> 3);
    type_ = static_cast<uint32_t>(tag & 7);
    return true;
  }
  bool ReadContent() {
    switch (type_) {
      case kVarint:
        return ReadVarint(&value_);
      case kFixed64:
        return ReadFixed(8);
      case kFixed32:
        return ReadFixed(4);
      case kBytes: {
        uint64_t size = 0;
        if (!ReadVarint(&size) || size > static_cast<uint64_t>(end_ - place_)) return false;
        bytes_ = {place_, static_cast<size_t>(size)};
        place_ += size;
        return true;
      }
      default:
        return false;
    }
  }
  // No message that is known here has groups, so they are skipped with their contents.
  bool SkipGroup() {
    uint32_t open[kMostNesting] = {number_};
    for (size_t depth = 1; depth > 0;) {
      if (!ReadTag()) return false;
      if (type_ == kGroup) {
        if (depth == kMostNesting) return false;
        open[depth++] = number_;
      } else if (type_ == kGroupEnd) {
        if (open[--depth] != number_) return false;
      } else if (!ReadContent()) {
        return false;
      }
    }
    type_ = kGroup;
    return true;
  }
  bool ReadFixed(size_t size) {
    if (static_cast<size_t>(end_ - place_) < size) return false;
    value_ = 0;
    std::memcpy(&value_, place_, size);  // little-endian, like this machine
    place_ += size;
    return true;
  }

  const char* place_;
  const char* const end_;
  uint32_t number_ = 0;
  uint32_t type_ = 0;
  uint64_t value_ = 0;
  std::string_view bytes_;
  bool ok_ = true;
};

inline void WriteVarint(std::string* out, uint64_t value) {
  while (value >= 128) {
    out->push_back(static_cast<char>(value | 128));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

inline void WriteTag(std::string* out, uint32_t number, WireType type) { WriteVarint(out, number << 3 | type); }

inline void WriteBytes(std::string* out, uint32_t number, std::string_view bytes) {
  WriteTag(out, number, kBytes);
  WriteVarint(out, bytes.size());
  out->append(bytes);
}

}  // namespace pytriton::grpc
