#include "http_response.h"

#include <strings.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace pytriton::guard {

namespace {

// At most so much is converted at a time, because the system does not take much more at once.
constexpr size_t kMostTaken = 64 * 1024;
constexpr std::string_view kEndOfHead = "\r\n\r\n";
constexpr std::string_view kEndOfLine = "\r\n";
constexpr std::string_view kLength = "content-length:";
constexpr std::string_view kType = "content-type:";

bool BeginsWith(std::string_view text, std::string_view begin) {
  return text.size() >= begin.size() && strncasecmp(text.data(), begin.data(), begin.size()) == 0;
}

}  // namespace

bool HttpResponse::IsToTryAgain() { return errno == EAGAIN || errno == EWOULDBLOCK; }

ssize_t HttpResponse::TryAgain() {
  errno = EAGAIN;
  return -1;
}

std::string HttpResponse::Take(const iovec* parts, int count) {
  std::string taken;
  for (int i = 0; i < count && taken.size() < kMostTaken; ++i) {
    taken.append(static_cast<const char*>(parts[i].iov_base), std::min(parts[i].iov_len, kMostTaken - taken.size()));
  }
  return taken;
}

std::string HttpResponse::Convert(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    size_t used = text.size();
    if (state_ == State::kHead) {
      used = ConvertHead(text, &out);
    } else if (state_ == State::kAsItIs) {
      out += text;
    } else if (state_ == State::kSkipped) {
      used = static_cast<size_t>(std::min<uint64_t>(text.size(), left_));
      left_ -= used;
      if (left_ == 0) state_ = State::kAsItIs;
    } else {
      used = JoinChunks(text, &out);
    }
    text.remove_prefix(used);
  }
  return out;
}

size_t HttpResponse::ConvertHead(std::string_view text, std::string* out) {
  const size_t before = line_.size();
  line_ += text;
  const size_t end = line_.find(kEndOfHead);
  if (end == std::string::npos) return text.size();
  line_.resize(end + kEndOfHead.size());
  const size_t used = line_.size() - before;
  // "HTTP/1.1 100 Continue" comes before the response.
  constexpr size_t kStatus = 9;
  *out += line_.size() > kStatus && line_[kStatus] == '1' ? line_ : CorrectHead();
  line_.clear();
  return used;
}

// Returns whether this head has the length of the response, and sets `left_` to it.
bool HttpResponse::FindLength(std::string_view head) {
  bool has_length = false;
  for (size_t at = 0; at < head.size();) {
    const size_t next = head.find(kEndOfLine, at) + kEndOfLine.size();
    const std::string_view line = head.substr(at, next - at);
    if (BeginsWith(line, kLength)) {
      has_length = true;
      left_ = std::strtoull(std::string(line.substr(kLength.size())).c_str(), nullptr, 10);
    }
    at = next;
  }
  return has_length;
}

std::string HttpResponse::CorrectHead() {
  const std::string_view head = line_;
  const bool has_chunks = head.find("\r\nTransfer-Encoding: chunked\r\n") != std::string_view::npos;
  // If a body in chunks is left out, the connection ends with it, because what follows is not read.
  if (leaves_out_body_ && has_chunks) joins_chunks_ = true;
  const bool joins = joins_chunks_ && has_chunks;
  const bool corrects = correction_ != nullptr && has_chunks && head.find("\r\nContent-Encoding:") == std::string_view::npos;
  const bool has_length = !has_chunks && FindLength(head);
  const bool replaces =
      has_length && !body_.empty() && head.find("\r\nContent-Encoding:") == std::string_view::npos;
  const bool skips = (replaces || leaves_out_body_) && has_length && left_ > 0;
  state_ = joins || corrects ? State::kChunkSize : skips ? State::kSkipped : State::kAsItIs;
  const bool is_empty = !has_chunks && (!keeps_length_ || (joins_chunks_ && !has_length));
  std::string corrected;
  for (size_t at = 0; at < head.size();) {
    const size_t next = head.find(kEndOfLine, at) + kEndOfLine.size();
    const std::string_view line = head.substr(at, next - at);
    // The status is kept if the body is kept, because it would contradict the body.
    if (at == 0 && !status_.empty() && (replaces || body_.empty())) {
      corrected.append(line.substr(0, line.find(' ') + 1)).append(status_).append(kEndOfLine);
    } else if ((BeginsWith(line, kLength) && (replaces || is_empty)) || (BeginsWith(line, kType) && replaces)) {
      // The end of the head is added below.
    } else if (line == kEndOfLine) {
      if (replaces) corrected.append("Content-Type: ").append(type_).append(kEndOfLine);
      if (replaces || is_empty) {
        corrected.append("Content-Length: ").append(std::to_string(is_empty ? 0 : body_.size())).append(kEndOfLine);
      }
      if (replaces) corrected += headers_;
      corrected.append(added_).append(kEndOfLine);
      if (replaces && !leaves_out_body_) corrected.append(body_);
    } else if (!joins || !(BeginsWith(line, "transfer-encoding:") || BeginsWith(line, "connection:"))) {
      corrected += line;
    }
    at = next;
  }
  if (corrects) held_.swap(corrected);
  return corrected;
}

// Sends the head with the status, which is known by now.
void HttpResponse::BeginCorrection(std::string* out) {
  if (held_.empty()) return;
  const std::string status = correction_->Begin();
  const size_t begin = held_.find(' ') + 1;
  if (!status.empty()) held_.replace(begin, held_.find(kEndOfLine) - begin, status);
  out->append(held_);
  held_.clear();
  is_corrected_ = true;
}

void HttpResponse::PutChunk(std::string_view text, std::string* out) {
  std::string corrected;
  if (is_corrected_) {
    correction_->Feed(text, &corrected);
    text = corrected;
  }
  if (joins_chunks_) {
    if (!leaves_out_body_) out->append(text);
  } else if (!text.empty()) {
    char size[24];
    std::snprintf(size, sizeof(size), "%zx", text.size());
    out->append(size).append(kEndOfLine).append(text).append(kEndOfLine);
  }
}

// Handles one line, or the bytes of a chunk that are there.
size_t HttpResponse::JoinChunks(std::string_view text, std::string* out) {
  if (state_ == State::kEnd) return text.size();
  if (state_ == State::kChunk) {
    const size_t used = static_cast<size_t>(std::min<uint64_t>(text.size(), left_));
    PutChunk(text.substr(0, used), out);
    left_ -= used;
    if (left_ == 0) state_ = State::kChunkEnd;
    return used;
  }
  const size_t end = text.find('\n');
  const size_t used = end == std::string_view::npos ? text.size() : end + 1;
  line_ += text.substr(0, used);
  if (end == std::string_view::npos) return used;
  if (state_ == State::kChunkEnd) {
    state_ = State::kChunkSize;
  } else {
    left_ = std::strtoull(line_.c_str(), nullptr, 16);
    BeginCorrection(out);
    if (left_ == 0 && !joins_chunks_) *out += line_;
    state_ = left_ > 0 ? State::kChunk : joins_chunks_ ? State::kEnd : State::kAsItIs;
  }
  line_.clear();
  return used;
}

}  // namespace pytriton::guard
