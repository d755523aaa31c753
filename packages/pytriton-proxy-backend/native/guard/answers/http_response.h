// Corrects a response of the HTTP front end while it is written: its status, and chunks that its caller cannot read.
//
// The front end (libevhtp 1.2.18) also sends chunks to callers with HTTP/1.0, who would take their sizes for text.
// These callers get only the text, and the connection ends after it. An answer to them without a body has no length,
// and they would wait for a body on a connection that is kept, so this adds the length.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace pytriton::guard {

// Converts the body of a response in chunks.
class BodyCorrection {
 public:
  virtual ~BodyCorrection() = default;
  // Is called when the first part of the body has come; the head is held back until then. Returns a status that
  // replaces the front end's, or "".
  virtual std::string Begin() = 0;
  // Appends the converted form of the next part of the body.
  virtual void Feed(std::string_view part, std::string* out) = 0;
};

class HttpResponse {
 public:
  // `status`, such as "400 Bad Request", replaces the front end's; "" keeps it.
  HttpResponse(std::string status, bool joins_chunks) : status_(std::move(status)), joins_chunks_(joins_chunks) {}
  // Also replaces body and type, and adds headers (lines with their ends), if the response has a length; another
  // response stays as it is.
  HttpResponse(std::string status, bool joins_chunks, std::string body, std::string headers,
               std::string type = "application/json")
      : status_(std::move(status)),
        joins_chunks_(joins_chunks),
        body_(std::move(body)),
        headers_(std::move(headers)),
        type_(std::move(type)) {}

  // Converts the body if the response has chunks; another response stays as it is.
  HttpResponse(std::unique_ptr<BodyCorrection> correction, bool joins_chunks)
      : joins_chunks_(joins_chunks), correction_(std::move(correction)) {}

  // To be called before the response is written: adds headers (lines with their ends), or leaves out the body. The
  // length then stays, as in an answer to HEAD, or becomes 0.
  void AddHeaders(std::string_view lines) { added_ += lines; }
  void LeaveOutBody(bool keeps_length) {
    leaves_out_body_ = true;
    keeps_length_ = keeps_length;
  }

  // Works like writev; `send(data, size)` is like the system's `send`. If converted bytes could not be sent, it reports
  // the last byte as unwritten, so that the front end, which then writes again, does not end before they are sent.
  template <typename Send>
  ssize_t Write(const iovec* parts, int count, Send send) {
    if (!rest_.empty()) {
      const ssize_t sent = send(rest_.data(), rest_.size());
      if (sent < 0) return sent;
      rest_.erase(0, static_cast<size_t>(sent));
      if (!rest_.empty()) return TryAgain();
    }
    const std::string taken = Take(parts, count);
    rest_ = Convert(std::string_view(taken).substr(owed_));
    const ssize_t sent = rest_.empty() ? 0 : send(rest_.data(), rest_.size());
    if (sent < 0 && !IsToTryAgain()) return sent;
    if (sent > 0) rest_.erase(0, static_cast<size_t>(sent));
    owed_ = rest_.empty() ? 0 : 1;
    return taken.size() == owed_ ? TryAgain() : static_cast<ssize_t>(taken.size() - owed_);
  }

  // Whether the rest of the response is passed on unchanged.
  bool is_done() const { return state_ == State::kAsItIs && rest_.empty(); }
  // Whether the last chunk was sent, after which the connection must end.
  bool is_at_end() const { return state_ == State::kEnd && rest_.empty(); }

 private:
  enum class State { kHead, kAsItIs, kSkipped, kChunkSize, kChunk, kChunkEnd, kEnd };

  static bool IsToTryAgain();
  static ssize_t TryAgain();
  static std::string Take(const iovec* parts, int count);
  std::string Convert(std::string_view text);
  size_t ConvertHead(std::string_view text, std::string* out);
  std::string CorrectHead();
  bool FindLength(std::string_view head);
  size_t JoinChunks(std::string_view text, std::string* out);
  void BeginCorrection(std::string* out);
  void PutChunk(std::string_view text, std::string* out);

  const std::string status_;
  bool joins_chunks_;
  const std::string body_;  // replaces the front end's body; "" keeps it
  const std::string headers_;
  const std::string type_;
  std::string added_;
  bool leaves_out_body_ = false;
  bool keeps_length_ = true;
  const std::unique_ptr<BodyCorrection> correction_;  // converts the chunks of the body; may be null
  std::string held_;  // the head, until the first chunk has come
  bool is_corrected_ = false;
  State state_ = State::kHead;
  std::string line_;   // what has come of the head, or of the line with the size of a chunk
  uint64_t left_ = 0;  // bytes left of the chunk, or of the body that is skipped
  std::string rest_;   // converted bytes that are not sent
  size_t owed_ = 0;    // bytes that are converted but were reported to the front end as unwritten
};

}  // namespace pytriton::guard
