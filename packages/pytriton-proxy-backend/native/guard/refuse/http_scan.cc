#include "http_scan.h"

#include <strings.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "../workarounds/trace_flag.h"

namespace pytriton::guard {

namespace {

// Honest heads are much shorter: other servers and proxies allow 8 to 64 KiB, and about a hundred fields.
constexpr uint64_t kMaxHeadBytes = 64 * 1024;
constexpr uint64_t kMaxHeaders = 500;
// The server's parser closes the connection without an answer if a part of the head is longer than 8 KiB.
constexpr uint64_t kMaxHeadLine = 8 * 1024;
constexpr uint64_t kMaxChunkLine = 32;
// The server counts in signed 32 bits, and newer servers end when the number is larger.
constexpr uint64_t kMaxJsonLength = INT32_MAX;

// JSON lies in memory as the body, as one piece for the parser, and as strings in the tree.
constexpr uint64_t kCopiesOfJson = 3;

// Each piece of a chunked body takes a block of at least so many bytes; a body of known length takes one block.
constexpr uint64_t kBytesPerPiece = 1024;
// So many blocks may have any size. The memory of small blocks stays with the server's thread after they are freed.
constexpr uint64_t kSmallBlocks = 65536;
// More blocks must hold so many bytes on average. A chunk of 1 KiB is cut in two if a read of the server ends in it.
constexpr uint64_t kLeastBlock = 512;

// Content types that the server treats specially: it parses a form on its stack, and answers the other one with
// `Content-Length: 0` before a body.
constexpr std::string_view kHarmful[] = {"application/x-www-form-urlencoded", "multipart"};
constexpr std::string_view kJsonHeaderSize = "json-header-size=";

bool EqualNoCase(std::string_view a, std::string_view b) {
  return a.size() == b.size() && strncasecmp(a.data(), b.data(), a.size()) == 0;
}

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Which parts of a request each byte may appear in.
struct ByteKinds {
  bool is_token[256] = {};
  bool is_control[256] = {};

  constexpr ByteKinds() {
    for (int byte = '0'; byte <= '9'; ++byte) is_token[byte] = true;
    for (int byte = 'A'; byte <= 'Z'; ++byte) is_token[byte] = is_token[byte + 32] = true;
    for (const char byte : std::string_view("!#$%&'*+-.^_`|~")) is_token[static_cast<unsigned char>(byte)] = true;
    for (int byte = 0; byte < 0x20; ++byte) is_control[byte] = byte != '\t';
    is_control[0x7f] = true;
  }
};
constexpr ByteKinds kKinds;

bool IsToken(std::string_view text) {
  bool is_token = !text.empty();
  for (const char byte : text) is_token = is_token && kKinds.is_token[static_cast<unsigned char>(byte)];
  return is_token;
}

bool HasControl(std::string_view text) {
  bool has_control = false;
  for (const char byte : text) has_control = has_control || kKinds.is_control[static_cast<unsigned char>(byte)];
  return has_control;
}

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

bool ParseNumber(std::string_view text, uint64_t* value) {
  if (text.empty() || text.size() > 18) return false;
  *value = 0;
  for (const char digit : text) {
    if (digit < '0' || digit > '9') return false;
    *value = *value * 10 + static_cast<uint64_t>(digit - '0');
  }
  return true;
}

// Whether the weights in an Accept-Encoding are short decimal numbers. The server passes them to std::stod and does not
// catch its exceptions.
bool HasGoodWeights(std::string_view value) {
  for (size_t at = 0; at + 1 < value.size(); ++at) {
    if ((value[at] != 'q' && value[at] != 'Q') || value[at + 1] != '=') continue;
    const std::string_view rest = value.substr(at + 2);
    const std::string_view weight = Trim(rest.substr(0, rest.find_first_of(",;")));
    if (weight.empty() || weight.size() > 8 || weight.find_first_not_of("0123456789.") != std::string_view::npos) {
      return false;
    }
  }
  return true;
}

// Paths by which load balancers ask for the health of a server or a model. The server's answers have no body, except at
// "/".
bool IsOfHealth(std::string_view path) {
  return path == "/" || path == "/v2/health/live" || path == "/v2/health/ready" ||
         (path.substr(0, 11) == "/v2/models/" && EndsWith(path, "/ready"));
}

// Where the path begins in a target, which may begin with scheme and host; npos for other kinds of targets.
size_t BeginOfPath(std::string_view target) {
  const size_t host = target.empty() || target.front() == '/' ? std::string_view::npos : target.find("://");
  return host == std::string_view::npos ? 0 : target.find('/', host + 3);
}

// Quotes a caller's text for an error.
std::string Quote(std::string_view text) {
  constexpr size_t kMost = 80;
  std::string quoted = "'";
  for (const char byte : text.substr(0, kMost)) {
    const auto code = static_cast<unsigned char>(byte);
    quoted += code < 0x20 || code >= 0x7f || byte == '"' || byte == '\\' ? '?' : byte;
  }
  return quoted + (text.size() > kMost ? "...'" : "'");
}

}  // namespace

size_t HttpScan::Feed(char* data, size_t size, const Limits& limits, uint64_t max_pieces) {
  size_t used = 0;
  while (used < size && !complete() && !is_refused()) {
    switch (state_) {
      case State::kBody:
      case State::kChunkData: {
        const size_t part = static_cast<size_t>(std::min<uint64_t>(size - used, left_));
        ConsumeBody(data + used, part, limits, max_pieces);
        used += part;
        left_ -= part;
        if (left_ == 0 && !is_refused()) {
          if (state_ == State::kBody) {
            EndRequest();
          } else {
            state_ = State::kChunkEnd;
          }
        }
        break;
      }
      default:
        used += FeedLine(data + used, size - used, limits);
    }
  }
  return used;
}

size_t HttpScan::FeedLine(char* data, size_t size, const Limits& limits) {
  auto* const end = static_cast<char*>(std::memchr(data, '\n', size));
  const size_t part = end == nullptr ? size : static_cast<size_t>(end - data) + 1;
  const bool in_head = state_ == State::kRequestLine || state_ == State::kHeaders;
  if (in_head) {
    head_bytes_ += part;
    if (head_bytes_ > kMaxHeadBytes || line_.size() + part > kMaxHeadLine) {
      const bool is_line = line_.size() + part > kMaxHeadLine;
      Refuse(431, is_line ? "a line in the head of the request has more than " + Bytes(kMaxHeadLine)
                          : "the head of the request has more than " + Bytes(kMaxHeadBytes));
      return part;
    }
  } else if (line_.size() + part > kMaxChunkLine) {
    Refuse(400, "a line of a chunked body has more than " + Bytes(kMaxChunkLine) + "; extensions of chunks and trailers "
                "are not taken");
    return part;
  }
  std::string_view line(data, part);
  if (end == nullptr || !line_.empty()) {
    line_.append(data, part);
    line = line_;
  }
  if (state_ == State::kHeaders) NeutralizeType(data, part);
  if (end == nullptr) {
    started_ = true;
    return part;
  }
  if (line.size() < 2 || line[line.size() - 2] != '\r') {
    Refuse(400, "a line of the request does not end with CR LF");
    return part;
  }
  line.remove_suffix(2);
  // This is read before the line is changed.
  if (state_ == State::kRequestLine) has_chunks_ = !EndsWith(line, " HTTP/1.0");
  if (is_last_ && line.size() + 2 == part) CloseAfter(line, data);
  if (makes_spans_ && line.size() + 2 == part) HideUnsampled(line, data);
  if (HasControl(line)) {
    Refuse(400, "the head of the request has a control character in " + Quote(line));
    return part;
  }
  ParseLine(line, line.size() + 2 == part ? data : nullptr, limits);
  line_.clear();
  return part;
}

// Makes the connection of an HTTP/1.0 caller end after the answer, unless it asks to keep it. A line that comes in
// pieces is not changed.
void HttpScan::CloseAfter(std::string_view line, char* data) {
  constexpr std::string_view kKeeps = " HTTP/1.1";
  if (state_ == State::kRequestLine && EndsWith(line, kKeeps)) data[line.size() - 1] = '0';
  if (state_ == State::kHeaders && strncasecmp(data, "connection:", 11) == 0) data[0] = 'x';
}

// Renames the header, so that the server does not see it. A line that comes in pieces is not changed.
void HttpScan::HideUnsampled(std::string_view line, char* data) {
  if (state_ != State::kHeaders || line.size() <= kTraceHeader.size() || line[kTraceHeader.size()] != ':') return;
  const bool is_named = strncasecmp(line.data(), kTraceHeader.data(), kTraceHeader.size()) == 0;
  if (is_named && IsUnsampled(line.substr(kTraceHeader.size() + 1))) data[0] = 'x';
}

// The server compares the content type with these when its line is complete. Their last letter is in the current bytes,
// or was changed before.
void HttpScan::NeutralizeType(char* data, size_t size) {
  const std::string_view line = line_.empty() ? std::string_view(data, size) : std::string_view(line_);
  if (line.size() < 12 || strncasecmp(line.data(), "content-type", 12) != 0) return;
  for (const std::string_view type : kHarmful) {
    // A type that ended before these bytes was found when it came.
    const size_t begin = line.size() < size + type.size() ? 0 : line.size() - size - type.size();
    for (size_t at = begin; at + type.size() <= line.size(); ++at) {
      const size_t last = at + type.size() - 1;
      if (strncasecmp(line.data() + at, type.data(), type.size()) != 0) continue;
      const size_t behind = line.size() - last;  // its distance from the end of the current bytes
      if (behind <= size) data[size - behind] = 'x';
    }
  }
}

void HttpScan::ParseLine(std::string_view line, char* data, const Limits& limits) {
  switch (state_) {
    case State::kRequestLine:
      // Line ends before a request are allowed.
      if (!line.empty()) ParseRequestLine(line, data);
      break;
    case State::kHeaders:
      if (line.empty()) {
        EndHeaders(limits);
      } else {
        ParseHeader(line);
      }
      break;
    case State::kChunkSize:
      ParseChunkSize(line, limits);
      break;
    case State::kChunkEnd:
      if (!line.empty()) {
        Refuse(400, "a chunk of the body is longer than its size says");
      } else {
        state_ = State::kChunkSize;
      }
      break;
    case State::kLastLine:
      if (!line.empty()) {
        Refuse(400, "there are trailers behind the chunked body, which are not taken");
      } else {
        EndRequest();
      }
      break;
    default:
      break;
  }
}

// Replaces a method of `method_size` bytes, at `data`, by GET. As the line keeps its length, the target gets longer: by
// a path if it has none, or by a query that nobody reads.
void HttpScan::AskByGet(size_t method_size, std::string_view target, char* data) {
  constexpr std::string_view kGet = "GET ";
  const size_t shorter = method_size + 1 - kGet.size();
  std::string behind(shorter, '&');
  const bool has_path = BeginOfPath(target) != std::string_view::npos;
  if (!has_path) behind[0] = '/';
  const size_t query = has_path ? 0 : 1;
  if (query < shorter && target.find('?') == std::string_view::npos) behind[query] = '?';
  const size_t target_size = target.size();
  std::memcpy(data, kGet.data(), kGet.size());
  std::memmove(data + kGet.size(), data + method_size + 1, target_size);
  std::memcpy(data + kGet.size() + target_size, behind.data(), shorter);
  is_head_ = true;
  is_get_ = true;
}

// `data` is where the line begins; null if it came in pieces.
void HttpScan::ParseRequestLine(std::string_view line, char* data) {
  started_ = true;
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  const std::string_view method = line.substr(0, first);
  const std::string_view version = last == std::string_view::npos ? "" : line.substr(last + 1);
  const bool has_target = first != std::string_view::npos && last > first + 1;
  const std::string_view target = has_target ? line.substr(first + 1, last - first - 1) : "";
  if (!has_target || !IsToken(method) ||
      target.find_first_of(" \t") != std::string_view::npos || (version != "HTTP/1.1" && version != "HTTP/1.0") ||
      method == "CONNECT") {
    Refuse(400, "expected METHOD PATH HTTP/1.1, got " + Quote(line));
    return;
  }
  is_post_ = method == "POST";
  is_get_ = method == "GET";
  // As in the server, `#` is an ordinary letter.
  const std::string_view place = target.substr(0, target.find('?'));
  const size_t path = BeginOfPath(place);
  path_ = path == std::string_view::npos ? "/" : place.substr(path);
  state_ = State::kHeaders;
  has_method_options_ = method == "OPTIONS";
  is_options_ = has_method_options_ && IsOfHealth(path_);
  if (method != "HEAD" && !is_options_) return;
  if (data != nullptr) {
    AskByGet(method.size(), target, data);
  } else if (method == "HEAD") {
    // The server would answer with a body, which the caller would take for the beginning of the next answer.
    Refuse(kNotAllowed, "");
  }
}

void HttpScan::ParseHeader(std::string_view line) {
  if (++header_count_ > kMaxHeaders) {
    Refuse(431, "the request has more than " + std::to_string(kMaxHeaders) + " header fields");
    return;
  }
  const size_t colon = line.find(':');
  const std::string_view name = line.substr(0, colon);
  if (colon == std::string_view::npos || !IsToken(name)) {
    Refuse(400, "expected 'Name: value' in the head of the request, got " + Quote(line));
    return;
  }
  const std::string_view value = Trim(line.substr(colon + 1));
  const auto once = [&](bool* seen) {
    if (std::exchange(*seen, true)) Refuse(400, "the request has more than one header " + Quote(name));
    return !is_refused();
  };
  const auto number = [&](std::string_view text, uint64_t most, uint64_t* parsed) {
    if (!ParseNumber(text, parsed) || *parsed > most) {
      Refuse(400, "expected a number of bytes in the header " + Quote(name) + ", got " + Quote(text));
    }
  };
  if (EqualNoCase(name, "content-length")) {
    if (once(&has_content_length_)) number(value, UINT64_MAX, &content_length_);
  } else if (EqualNoCase(name, "inference-header-content-length")) {
    if (once(&has_json_length_)) number(value, kMaxJsonLength, &json_length_);
  } else if (EqualNoCase(name, "transfer-encoding")) {
    if (!once(&is_chunked_)) return;
    // The comparison is the server's, which does not recognize chunks if the text differs.
    const std::string_view exact = line.substr(std::min(line.find_first_not_of(' ', colon + 1), line.size()));
    if (exact != "chunked" && exact != "Chunked") {
      Refuse(501, "expected 'chunked' in the header 'Transfer-Encoding', got " + Quote(value));
    }
  } else if (EqualNoCase(name, "content-encoding")) {
    if (once(&has_content_encoding_)) is_compressed_ = !value.empty() && value != "identity";
  } else if (EqualNoCase(name, "content-type")) {
    if (!once(&has_content_type_)) return;
    const size_t at = value.find(kJsonHeaderSize);
    if (at == std::string_view::npos) return;
    has_type_json_length_ = true;
    number(value.substr(at + kJsonHeaderSize.size()), kMaxJsonLength, &type_json_length_);
  } else if (EqualNoCase(name, "accept-encoding")) {
    if (!HasGoodWeights(value)) {
      Refuse(400, "expected weights from 0 to 1 in the header 'Accept-Encoding', got " + Quote(value));
    }
  } else if (EqualNoCase(name, "accept")) {
    wants_html_ = wants_html_ || value.find("text/html") != std::string_view::npos;
  } else if (EqualNoCase(name, "x-vertex-ai-triton-redirect")) {
    if (once(&has_redirect_)) redirects_to_infer_ = EndsWith(value, "/infer");
  } else if (EqualNoCase(name, "sec-fetch-site")) {
    fetch_site_ = value;
  } else if (reads_origin_ && EqualNoCase(name, "host")) {
    host_ = value;
  } else if (reads_origin_ && EqualNoCase(name, "origin")) {
    if (once(&has_origin_)) origin_ = value;
  } else if (reads_origin_ && EqualNoCase(name, "access-control-request-method")) {
    wants_method_ = true;
  } else if (reads_origin_ && EqualNoCase(name, "access-control-request-headers")) {
    wanted_headers_ = value;
  }
}

bool HttpScan::is_of_another_site() const {
  if (!is_post_ || is_in_head()) return false;
  if (!fetch_site_.empty()) return fetch_site_ != "same-origin" && fetch_site_ != "none";
  // "null" is the origin of what has none, such as a file or a frame in a sandbox.
  const size_t scheme = origin_.find("://");
  return !origin_.empty() && (scheme == std::string::npos || !EqualNoCase(origin_.substr(scheme + 3), host_));
}

void HttpScan::EndHeaders(const Limits& limits) {
  if (is_chunked_ && has_content_length_) {
    Refuse(400, "the request has both a Content-Length and a Transfer-Encoding");
    return;
  }
  if (content_length_ > limits.max_request_bytes) {
    Refuse(413, "the body has " + std::to_string(content_length_) + " bytes, more than " +
                    std::to_string(limits.max_request_bytes) + ", the limit max_request_bytes of the guard");
    return;
  }
  // Only inference takes compressed bodies, and tensors after the JSON. Which header gives the length of the JSON
  // depends on the front end: KServe's own, or that of SageMaker or Vertex AI, whose paths are not Triton's.
  const bool is_inference = IsTritonPath() ? EndsWith(path_, "/infer")
                                           : !EndsWith(path_, "/models") && (!has_redirect_ || redirects_to_infer_);
  is_compressed_ = is_compressed_ && is_inference;
  keeps_text_ = IsTritonPath() && (EndsWith(path_, "/generate") || EndsWith(path_, "/generate_stream"));
  if (is_inference) {
    json_left_ = JsonLength();
    must_hold_json_ = json_left_ != UINT64_MAX && !is_compressed_;
  }
  if (is_chunked_) {
    state_ = State::kChunkSize;
  } else if (content_length_ > 0) {
    state_ = State::kBody;
    left_ = content_length_;
    if (must_hold_json_ && json_left_ > content_length_) EndRequest();
  } else {
    EndRequest();
  }
}

bool HttpScan::IsTritonPath() const { return path_.find("/v2/") != std::string::npos; }

uint64_t HttpScan::JsonLength() const {
  if (IsTritonPath()) return has_json_length_ ? json_length_ : UINT64_MAX;
  return has_type_json_length_ ? type_json_length_ : UINT64_MAX;
}

void HttpScan::ParseChunkSize(std::string_view line, const Limits& limits) {
  if (line.empty() || line.size() > 15 || line.find_first_not_of("0123456789abcdefABCDEF") != std::string_view::npos) {
    Refuse(400, "expected the size of a chunk in hexadecimal digits, got " + Quote(line));
    return;
  }
  left_ = std::stoull(std::string(line), nullptr, 16);
  if (left_ == 0) {
    state_ = State::kLastLine;
  } else if (left_ > limits.max_request_bytes - body_bytes_) {
    Refuse(413, "the chunked body has more than " + std::to_string(limits.max_request_bytes) +
                    " bytes, the limit max_request_bytes of the guard");
  } else {
    state_ = State::kChunkData;
    ++pieces_;
  }
}

void HttpScan::ConsumeBody(const char* data, size_t size, const Limits& limits, uint64_t max_pieces) {
  body_bytes_ += size;
  // The server keeps a list of the pieces of a body on its stack: one for each chunk, or for each read.
  if (++pieces_ > max_pieces) {
    Refuse(413, "the body came in more than " + std::to_string(max_pieces) +
                    " pieces (chunks, or reads of the server); send larger ones");
    return;
  }
  if (is_chunked_ && ++blocks_ > kSmallBlocks && body_bytes_ < blocks_ * kLeastBlock) {
    Refuse(413, "the body came in more than " + std::to_string(kSmallBlocks) +
                    " pieces (chunks, or reads of the server) of less than " + Bytes(kLeastBlock) +
                    " on average; send larger ones");
    return;
  }
  if (!is_compressed_) ScanJson(data, size, limits);
  if (keeps_text_) text_.Add(data, size);
}

void HttpScan::ScanJson(const char* data, size_t size, const Limits& limits) {
  const size_t part = static_cast<size_t>(std::min<uint64_t>(size, json_left_));
  if (json_left_ != UINT64_MAX) json_left_ -= part;
  json_bytes_ += part;
  std::string problem;
  if (!json_.Feed(data, part, limits.max_json_depth, &problem)) Refuse(400, std::move(problem));
  if (json_.MayOverflow(json_bytes_)) Refuse(413, "the JSON of the request has more values than the server can count");
}

bool HttpScan::FindInference(InferencePath* found) const {
  constexpr std::string_view kModels = "/v2/models/";
  const std::string_view path = path_;
  if (path.substr(0, kModels.size()) != kModels) return false;
  const std::string_view rest = path.substr(kModels.size());
  const std::string_view name = rest.substr(0, rest.find('/'));
  const std::string_view what = rest.substr(rest.rfind('/') + 1);
  if (name.size() == rest.size() || (what != "infer" && what != "generate" && what != "generate_stream")) return false;
  found->model = name;
  constexpr std::string_view kVersions = "/versions/";
  const std::string_view middle = rest.substr(name.size(), rest.size() - name.size() - what.size());
  uint64_t version = 0;
  if (middle.substr(0, kVersions.size()) == kVersions &&
      ParseNumber(middle.substr(kVersions.size(), middle.size() - kVersions.size() - 1), &version)) {
    found->version = static_cast<int64_t>(version);
  }
  found->endpoint = what;
  found->is_post = is_post_;
  found->is_stream = what == "generate_stream";
  return true;
}

bool HttpScan::AsksForPage(bool* wants_html) const {
  *wants_html = wants_html_;
  return is_get_ && (path_ == "/" || path_ == "/docs");
}

size_t HttpScan::LookAtCutLine() {
  if (state_ != State::kRequestLine || line_.empty()) return 0;
  std::string_view line = line_;
  if (line.back() == '\r') line.remove_suffix(1);
  // A caller with another protocol, such as TLS, must not wait for an answer.
  if (HasControl(line) || (!line.empty() && !IsToken(line.substr(0, line.find(' '))))) {
    Refuse(400, "expected METHOD PATH HTTP/1.1, got " + Quote(line));
  }
  return line_.size();
}

void HttpScan::EndRequest() {
  state_ = State::kComplete;
  if (must_hold_json_ && json_left_ > 0) {
    Refuse(400, "the JSON part is said to have more bytes than the body, which has " +
                    std::to_string(is_chunked_ ? body_bytes_ : content_length_));
  }
}

uint64_t HttpScan::memory() const {
  return body_bytes_ + text_.memory() + blocks_ * kBytesPerPiece + json_bytes_ * (kCopiesOfJson - 1) +
         json_.values() * kBytesPerJsonValue;
}

void HttpScan::Refuse(int status, std::string text) {
  refusal_.status = status;
  refusal_.text = std::move(text);
}

}  // namespace pytriton::guard
