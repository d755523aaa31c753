// Follows the requests that arrive on one HTTP/1.1 connection, before the server's own parser, and finds those that
// would end the server or exhaust its memory. No I/O: it gets bytes and returns a verdict.
//
// It must understand each request in the same way as the server. So it refuses what is ambiguous, or rare enough for
// parsers to differ (bare line feeds, folded lines, two lengths, chunk extensions, trailers). It examines the whole
// body as JSON, unless the handler of the path takes binary tensors after the JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "json_scan.h"
#include "../limits.h"
#include "request_text.h"

namespace pytriton::guard {

constexpr int kNotAllowed = 405;
constexpr int kNoContent = 204;

struct Refusal {
  int status = 0;  // the HTTP status; 0 if the request is not refused
  std::string text;
};

// The parts of a path that asks for inference, such as `/v2/models/NAME[/versions/VERSION]/infer`.
struct InferencePath {
  std::string model;
  int64_t version = -1;  // -1 for the newest
  std::string endpoint;  // the last part
  bool is_post = true;
  bool is_stream = false;
};

class HttpScan {
 public:
  // Forgets everything; the next byte begins a request.
  void Begin() { *this = HttpScan(); }
  // Like Begin, and also frees the memory.
  void Clear() { const HttpScan old = std::exchange(*this, HttpScan()); }

  // Whether the current request must be the last one of its connection. It is then changed in place, so that the server
  // closes the connection after its answer.
  void set_last(bool is_last) { is_last_ = is_last; }
  // Whether the server makes spans; if so, it must not see a `traceparent` whose caller wants none.
  void set_makes_spans(bool makes_spans) { makes_spans_ = makes_spans; }
  // Whether the headers that browsers send for a page of another origin are read.
  void set_reads_origin(bool reads_origin) { reads_origin_ = reads_origin; }

  // Reads on and returns how many bytes it took: fewer than `size` if the request ends in them or is refused. Content
  // types that the server treats specially are made harmless in place. HEAD, which the server serves nowhere, becomes
  // GET, and so does OPTIONS for the paths by which load balancers ask for health.
  size_t Feed(char* data, size_t size, const Limits& limits, uint64_t max_pieces);

  // Whether any byte of a request was read, not counting line ends before it.
  bool started() const { return started_; }
  bool complete() const { return state_ == State::kComplete; }
  // Whether a head has begun and not ended.
  bool is_in_head() const { return started_ && (state_ == State::kRequestLine || state_ == State::kHeaders); }
  // How many bytes of an incomplete first line have come. Refuses the request if no first line begins like this.
  size_t LookAtCutLine();
  const Refusal& refusal() const { return refusal_; }
  bool is_refused() const { return refusal_.status != 0; }
  bool is_compressed() const { return is_compressed_; }
  // Returns false if the request is not for inference, or its first line has not come.
  bool FindInference(InferencePath* found) const;

  // False if the caller speaks HTTP/1.0, which has no chunks.
  bool has_chunks() const { return has_chunks_; }
  // Whether the answer must have no body: for HEAD, and for OPTIONS if it became GET.
  bool is_head() const { return is_head_; }
  bool is_options() const { return is_options_; }

  // Whether the request may change something (POST), and a browser says that a page of another site sends it. Older
  // browsers do not say that, nor does any over plain HTTP to another machine; then the origin is compared with the host,
  // if origins are read.
  bool is_of_another_site() const;
  // The origin of the page that sends the request; "" if there is none, or if origins are not read.
  const std::string& origin() const { return origin_; }
  // Whether a browser asks with this request what a page may send; such a request is not for the server. Also returns
  // the headers that the page would send.
  bool is_preflight() const { return has_method_options_ && wants_method_ && !origin_.empty(); }
  const std::string& wanted_headers() const { return wanted_headers_; }

  // Whether the request asks for the page about the server, and as what.
  bool AsksForPage(bool* wants_html) const;
  // Whether this is a request to `generate`, whose body is kept. The body is handed over, so a connection that waits
  // keeps none.
  bool keeps_text() const { return keeps_text_; }
  RequestText TakeText() { return std::exchange(text_, RequestText()); }

  // The bytes of the body as it was sent.
  uint64_t body_bytes() const { return body_bytes_; }

  // About how much memory the server takes for the request: the body, copies of JSON texts and the nodes of its tree.
  uint64_t memory() const;

 private:
  enum class State { kRequestLine, kHeaders, kBody, kChunkSize, kChunkData, kChunkEnd, kLastLine, kComplete };

  size_t FeedLine(char* data, size_t size, const Limits& limits);
  void NeutralizeType(char* data, size_t size);
  void CloseAfter(std::string_view line, char* data);
  void HideUnsampled(std::string_view line, char* data);
  void ParseLine(std::string_view line, char* data, const Limits& limits);
  void ParseRequestLine(std::string_view line, char* data);
  void AskByGet(size_t method_size, std::string_view target, char* data);
  void ParseHeader(std::string_view line);
  void EndHeaders(const Limits& limits);
  void ParseChunkSize(std::string_view line, const Limits& limits);
  void ConsumeBody(const char* data, size_t size, const Limits& limits, uint64_t max_pieces);
  bool IsTritonPath() const;
  uint64_t JsonLength() const;  // the length of an inference's JSON; UINT64_MAX for the whole body
  void ScanJson(const char* data, size_t size, const Limits& limits);
  void EndRequest();
  void Refuse(int status, std::string text);

  State state_ = State::kRequestLine;
  bool started_ = false;
  bool is_last_ = false;
  bool makes_spans_ = false;
  Refusal refusal_;
  std::string line_;  // what has come of an incomplete line
  uint64_t head_bytes_ = 0;
  uint64_t header_count_ = 0;

  std::string path_;
  bool is_post_ = false;
  bool is_get_ = false;
  bool is_head_ = false;
  bool is_options_ = false;
  bool reads_origin_ = false;
  bool has_method_options_ = false;
  bool wants_method_ = false;
  bool has_origin_ = false;
  std::string origin_;
  std::string host_;
  std::string fetch_site_;
  std::string wanted_headers_;
  bool wants_html_ = false;
  bool keeps_text_ = false;
  RequestText text_;
  bool has_chunks_ = true;
  bool is_chunked_ = false;
  bool is_compressed_ = false;
  bool has_content_length_ = false;
  bool has_content_type_ = false;
  bool has_content_encoding_ = false;
  bool has_redirect_ = false;
  bool redirects_to_infer_ = false;
  bool has_json_length_ = false;       // Inference-Header-Content-Length
  bool has_type_json_length_ = false;  // json-header-size in the content type, for SageMaker and Vertex AI
  uint64_t content_length_ = 0;
  uint64_t json_length_ = 0;
  uint64_t type_json_length_ = 0;

  bool must_hold_json_ = false;  // the body must be at least as long as its JSON part claims to be
  uint64_t json_left_ = UINT64_MAX;
  uint64_t json_bytes_ = 0;
  uint64_t left_ = 0;  // bytes left of the body, or of this chunk
  uint64_t body_bytes_ = 0;
  uint64_t pieces_ = 0;
  uint64_t blocks_ = 0;  // blocks of memory in which the server keeps the body
  JsonScan json_;
};

}  // namespace pytriton::guard
