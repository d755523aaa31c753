#include "http_answers.h"

#include <strings.h>

#include <algorithm>
#include <cstdlib>

namespace pytriton::guard {

namespace {

// No head of the front end and no size of a chunk is longer; at most so much of each is read in one piece.
constexpr size_t kMostHead = 1024 * 1024;
constexpr size_t kMostLine = 1024;
constexpr size_t kHeadPiece = 1024;
constexpr size_t kLinePiece = 32;
constexpr uint64_t kMostBody = 1ull << 62;
constexpr std::string_view kEndOfHead = "\r\n\r\n";
constexpr std::string_view kEndOfLine = "\r\n";
constexpr std::string_view kBegin = "HTTP/1.";
// The place of the status, after "HTTP/1.1 ".
constexpr size_t kStatus = 9;

bool BeginsWith(std::string_view text, std::string_view begin) {
  return text.size() >= begin.size() && strncasecmp(text.data(), begin.data(), begin.size()) == 0;
}

}  // namespace

size_t HttpAnswers::Feed(std::string_view text) {
  size_t used = 0;
  while (used < text.size()) {
    const std::string_view rest = text.substr(used);
    if (state_ == State::kLost) return text.size();
    if (state_ == State::kBody || state_ == State::kChunk) {
      const size_t part = static_cast<size_t>(std::min<uint64_t>(rest.size(), left_));
      left_ -= part;
      used += part;
      if (left_ == 0 && state_ == State::kChunk) ++chunks_;
      if (left_ == 0) state_ = state_ == State::kBody ? State::kHead : State::kChunkSize;
    } else {
      used += FeedLine(rest);
    }
    if (is_at_begin()) break;
  }
  return used;
}

size_t HttpAnswers::Feed(const iovec* parts, size_t most) {
  size_t used = 0;
  for (size_t i = 0; used < most; ++i) {
    const std::string_view part(static_cast<const char*>(parts[i].iov_base), std::min(parts[i].iov_len, most - used));
    const size_t taken = Feed(part);
    used += taken;
    if (taken < part.size() || (!part.empty() && is_at_begin())) break;
  }
  return used;
}

// Reads a head, or a line of a chunked body.
size_t HttpAnswers::FeedLine(std::string_view text) {
  const bool is_head = state_ == State::kHead;
  const std::string_view end_of = is_head ? kEndOfHead : kEndOfLine;
  const size_t before = line_.size();
  const std::string_view piece = text.substr(0, is_head ? kHeadPiece : kLinePiece);
  line_ += piece;
  // The end of the line may have begun in the bytes before.
  const size_t end = line_.find(end_of, before - std::min(before, end_of.size()));
  if (end == std::string::npos) {
    const bool is_wrong = is_head && line_.compare(0, kBegin.size(), kBegin.substr(0, line_.size())) != 0;
    if (is_wrong || line_.size() > (is_head ? kMostHead : kMostLine)) Lose();
    return piece.size();
  }
  line_.resize(end + end_of.size());
  const size_t used = line_.size() - before;
  if (is_head) {
    EndHead();
  } else if (state_ == State::kTrailers) {
    if (end == 0) state_ = State::kHead;
  } else {
    char* number_end = nullptr;
    left_ = std::strtoull(line_.c_str(), &number_end, 16);
    state_ = number_end == line_.c_str() ? State::kLost : left_ == 0 ? State::kTrailers : State::kChunk;
    left_ = std::min(left_, kMostBody) + kEndOfLine.size();
  }
  line_.clear();
  return used;
}

void HttpAnswers::Lose() {
  state_ = State::kLost;
  line_.clear();
}

void HttpAnswers::EndHead() {
  const std::string_view head = line_;
  if (!BeginsWith(head, kBegin) || head.size() <= kStatus) {
    state_ = State::kLost;
    return;
  }
  const bool is_empty = head[kStatus] == '1' || head.substr(kStatus, 3) == "204" || head.substr(kStatus, 3) == "304";
  bool has_chunks = false;
  bool has_length = false;
  for (size_t at = 0; at < head.size();) {
    const size_t next = head.find(kEndOfLine, at) + kEndOfLine.size();
    const std::string_view line = head.substr(at, next - at);
    if (BeginsWith(line, "transfer-encoding: chunked")) has_chunks = true;
    if (BeginsWith(line, "content-length:")) {
      has_length = true;
      left_ = std::strtoull(std::string(line.substr(line.find(':') + 1)).c_str(), nullptr, 10);
    }
    at = next;
  }
  if (is_empty) {
    state_ = State::kHead;
  } else if (has_chunks) {
    state_ = State::kChunkSize;
  } else {
    // If the head has no length, the front end sends no body.
    state_ = has_length && left_ > 0 ? State::kBody : State::kHead;
  }
}

std::string StatusIn(const iovec* parts, int count) {
  constexpr size_t kMost = 15;
  std::string begin;
  for (int i = 0; i < count && begin.size() < kMost; ++i) {
    begin.append(static_cast<const char*>(parts[i].iov_base), std::min(parts[i].iov_len, kMost - begin.size()));
  }
  if (!BeginsWith(begin, kBegin) || begin.size() < kStatus + 3 || begin[kStatus] == '1') return "";
  return begin.substr(kStatus);
}

std::vector<iovec> FirstOf(const iovec* parts, int count, size_t most) {
  std::vector<iovec> first;
  for (int i = 0; i < count && most > 0; ++i) {
    first.push_back({parts[i].iov_base, std::min(parts[i].iov_len, most)});
    most -= first.back().iov_len;
  }
  return first;
}

size_t SizeOf(const iovec* parts, int count) {
  size_t size = 0;
  for (int i = 0; i < count; ++i) size += parts[i].iov_len;
  return size;
}

}  // namespace pytriton::guard
