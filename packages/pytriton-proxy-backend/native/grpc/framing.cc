#include "framing.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace pytriton::grpc {

namespace {

// Up to this announced size, memory is taken at once.
constexpr size_t kBelieved = 1 << 20;
// What a request takes besides its message, here and in Triton.
constexpr size_t kOfRequest = 2048;

// zlib's z_stream, which has not changed since 1995. tritonserver has loaded the library.
struct ZStream {
  const unsigned char* next_in;
  unsigned avail_in;
  unsigned long total_in;
  unsigned char* next_out;
  unsigned avail_out;
  unsigned long total_out;
  const char* message;
  void* state;
  void* (*allocate)(void*, unsigned, unsigned);
  void (*free)(void*, void*);
  void* opaque;
  int data_type;
  unsigned long adler;
  unsigned long reserved;
};

constexpr int kZOk = 0;
constexpr int kZStreamEnd = 1;
constexpr int kZBufError = -5;
constexpr int kGzipWindow = 15 + 16;
constexpr int kZlibWindow = 15;

struct Zlib {
  const char* (*version)();
  int (*init)(ZStream*, int window, const char* version, int size);
  int (*inflate)(ZStream*, int flush);
  int (*end)(ZStream*);
};

// `inflate` is looked up behind this library, whose own `inflate` is called by the HTTP front end.
const Zlib* FindZlib() {
  static const Zlib zlib = {
      reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "zlibVersion")),
      reinterpret_cast<int (*)(ZStream*, int, const char*, int)>(dlsym(RTLD_DEFAULT, "inflateInit2_")),
      reinterpret_cast<int (*)(ZStream*, int)>(dlsym(RTLD_NEXT, "inflate")),
      reinterpret_cast<int (*)(ZStream*)>(dlsym(RTLD_DEFAULT, "inflateEnd")),
  };
  const bool is_there = zlib.version != nullptr && zlib.init != nullptr && zlib.inflate != nullptr && zlib.end != nullptr;
  return is_there ? &zlib : nullptr;
}

}  // namespace

void WritePrefix(char* prefix, size_t size) {
  prefix[0] = 0;
  for (int i = 0; i < 4; ++i) prefix[1 + i] = static_cast<char>(size >> (24 - 8 * i));
}

Status NoneLeft() {
  return {Code::kUnavailable,
          "The requests in flight need more memory than max_in_flight_bytes of the guard leaves; try again later."};
}

MessageReader::Result MessageReader::Feed(const char* data, size_t size, size_t* used, Held* held) {
  *used = 0;
  if (prefix_size_ < kPrefixSize) {
    const size_t count = std::min(kPrefixSize - prefix_size_, size);
    std::memcpy(prefix_ + prefix_size_, data, count);
    prefix_size_ += count;
    *used = count;
    if (prefix_size_ < kPrefixSize) return Result::kNeedsMore;
    message_size_ = 0;
    for (int i = 1; i < 5; ++i) message_size_ = message_size_ << 8 | static_cast<unsigned char>(prefix_[i]);
    if (message_size_ > limit_) return Result::kTooLarge;
    capacity_ = std::min(message_size_, kBelieved);
    if (held != nullptr && !held->Grow(capacity_ + kOfRequest)) return Result::kNoneLeft;
    message_.reset(new (std::nothrow) char[std::max<size_t>(capacity_, 1)]);
    if (message_ == nullptr) return Result::kNoMemory;
  }
  const size_t count = std::min(message_size_ - received_, size - *used);
  if (received_ + count > capacity_) {
    const size_t larger = std::min(message_size_, std::max(received_ + count, capacity_ * 4));
    if (held != nullptr && !held->Grow(larger + kOfRequest)) return Result::kNoneLeft;
    std::unique_ptr<char[]> grown(new (std::nothrow) char[larger]);
    if (grown == nullptr) return Result::kNoMemory;
    std::memcpy(grown.get(), message_.get(), received_);
    message_ = std::move(grown);
    capacity_ = larger;
  }
  std::memcpy(message_.get() + received_, data + *used, count);
  received_ += count;
  *used += count;
  return received_ == message_size_ ? Result::kMessage : Result::kNeedsMore;
}

Chunk MessageReader::Take(bool* is_compressed) {
  *is_compressed = (prefix_[0] & 1) != 0;
  Chunk chunk{std::move(message_), message_size_};
  prefix_size_ = message_size_ = received_ = capacity_ = 0;
  return chunk;
}

Status Decompress(std::string_view encoding, size_t limit, Chunk* message, Held* held) {
  const Zlib* const zlib = FindZlib();
  if (zlib == nullptr || (encoding != "gzip" && encoding != "deflate")) {
    return {Code::kUnimplemented,
            "Messages compressed with '" + std::string(encoding) + "' are not read; gzip, deflate and identity are."};
  }
  ZStream stream{};
  if (zlib->init(&stream, encoding == "gzip" ? kGzipWindow : kZlibWindow, zlib->version(), sizeof(stream)) != kZOk) {
    return {Code::kInternal, "The decompression of a message could not be started."};
  }
  const uint64_t before = held->bytes();
  Chunk plain;
  size_t capacity = 0;
  stream.next_in = reinterpret_cast<const unsigned char*>(message->data.get());
  stream.avail_in = static_cast<unsigned>(message->size);
  Status status;
  for (;;) {
    if (stream.avail_out == 0) {
      if (capacity > 0 && capacity >= limit) {
        status = {Code::kResourceExhausted, "A compressed message grows to more than " + std::to_string(limit) +
                                                " bytes, the limit max_request_bytes of the guard."};
        break;
      }
      const size_t larger = std::min(limit, std::max<size_t>({capacity * 2, message->size * 2, 4096}));
      if (!held->Grow(before + larger)) {
        status = NoneLeft();
        break;
      }
      std::unique_ptr<char[]> grown(new (std::nothrow) char[std::max<size_t>(larger, 1)]);
      if (grown == nullptr) {
        status = {Code::kResourceExhausted, "The server has no memory for a message of " + std::to_string(larger) + " bytes.",
                  guard::Outcome::kUnavailable};
        break;
      }
      if (stream.total_out > 0) std::memcpy(grown.get(), plain.data.get(), stream.total_out);
      plain.data = std::move(grown);
      capacity = larger;
      stream.next_out = reinterpret_cast<unsigned char*>(plain.data.get()) + stream.total_out;
      stream.avail_out = static_cast<unsigned>(capacity - stream.total_out);
    }
    const int result = zlib->inflate(&stream, 0);
    if (result == kZStreamEnd) break;
    if ((result != kZOk && result != kZBufError) || (stream.avail_out > 0 && stream.avail_in == 0)) {
      status = {Code::kInternal, "A message that is marked as compressed with " + std::string(encoding) + " is not."};
      break;
    }
  }
  plain.size = stream.total_out;
  zlib->end(&stream);
  if (status.code == Code::kOk) {
    // The compressed message is freed, and memory beyond the size was never touched.
    held->Shrink(before - std::min<uint64_t>(before, message->size) + plain.size);
    *message = std::move(plain);
  }
  return status;
}

std::optional<std::chrono::nanoseconds> ParseTimeout(std::string_view text) {
  constexpr size_t kMostDigits = 8;
  if (text.size() < 2 || text.size() > kMostDigits + 1) return std::nullopt;
  int64_t value = 0;
  for (const char digit : text.substr(0, text.size() - 1)) {
    if (digit < '0' || digit > '9') return std::nullopt;
    value = value * 10 + (digit - '0');
  }
  switch (text.back()) {
    case 'H':
      // The largest value stands for 11,000 years; a clock in nanoseconds ends before that.
      return std::chrono::hours(std::min<int64_t>(value, 24 * 365 * 100));
    case 'M':
      return std::chrono::minutes(value);
    case 'S':
      return std::chrono::seconds(value);
    case 'm':
      return std::chrono::milliseconds(value);
    case 'u':
      return std::chrono::microseconds(value);
    case 'n':
      return std::chrono::nanoseconds(value);
    default:
      return std::nullopt;
  }
}

std::string PercentDecode(std::string_view text) {
  const auto digit = [](char letter) {
    if (letter >= '0' && letter <= '9') return letter - '0';
    const char small = static_cast<char>(letter | 0x20);
    return small >= 'a' && small <= 'f' ? small - 'a' + 10 : -1;
  };
  std::string decoded;
  decoded.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && digit(text[i + 1]) >= 0 && digit(text[i + 2]) >= 0) {
      decoded.push_back(static_cast<char>(digit(text[i + 1]) << 4 | digit(text[i + 2])));
      i += 2;
    } else {
      decoded.push_back(text[i]);
    }
  }
  return decoded;
}

std::string PercentEncode(std::string_view text) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string encoded;
  encoded.reserve(text.size());
  for (const char letter : text) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte >= 0x20 && byte <= 0x7e && byte != '%') {
      encoded.push_back(letter);
    } else {
      encoded += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return encoded;
}

}  // namespace pytriton::grpc
