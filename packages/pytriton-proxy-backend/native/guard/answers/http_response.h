// Corrects a response of the HTTP front end while it is written: its status, and chunks that its caller cannot read.
//
// The front end (libevhtp 1.2.18) sends chunks to callers of HTTP/1.0 as well, who take the sizes between them for text.
// Those get the text alone, which ends where the connection does. An answer to them that has no body says nothing of its
// length, so that they would wait for one on a connection that is kept: it is said here.
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

// What becomes of the body of a response in chunks.
class BodyCorrection {
 public:
  virtual ~BodyCorrection() = default;
  // Called when the first of the body has come: so long the head is held back. Returns the status in place of the front
  // end's, or nothing.
  virtual std::string Begin() = 0;
  // Appends what becomes of the next part of the body.
  virtual void Feed(std::string_view part, std::string* out) = 0;
};

class HttpResponse {
 public:
  // `status` is "400 Bad Request" or the like, in place of the front end's; empty: that stays.
  HttpResponse(std::string status, bool joins_chunks) : status_(std::move(status)), joins_chunks_(joins_chunks) {}
  // As before, with another body and its type, and headers of its own (lines, each with its end), where the response has a
  // length; all of another one stays.
  HttpResponse(std::string status, bool joins_chunks, std::string body, std::string headers,
               std::string type = "application/json")
      : status_(std::move(status)),
        joins_chunks_(joins_chunks),
        body_(std::move(body)),
        headers_(std::move(headers)),
        type_(std::move(type)) {}

  // With another body where the response has chunks; any other one stays.
  HttpResponse(std::unique_ptr<BodyCorrection> correction, bool joins_chunks)
      : joins_chunks_(joins_chunks), correction_(std::move(correction)) {}

  // Before it is written: the headers that it has besides (lines, each with its end), and whether it has no body. Its length
  // then stays, as HEAD is answered, or becomes 0.
  void AddHeaders(std::string_view lines) { added_ += lines; }
  void LeaveOutBody(bool keeps_length) {
    leaves_out_body_ = true;
    keeps_length_ = keeps_length;
  }

  // As writev. `send(data, size)` is as the system's `send`. It may take back a byte that it has converted: as long as the
  // front end has one to write, it comes again, so that nothing converted is left over.
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

  // Whether the rest of the response needs no correction.
  bool is_done() const { return state_ == State::kAsItIs && rest_.empty(); }
  // Whether the last chunk was sent, behind which the connection is to end.
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
  const std::string body_;  // in place of the front end's; empty: that stays
  const std::string headers_;
  const std::string type_;
  std::string added_;
  bool leaves_out_body_ = false;
  bool keeps_length_ = true;
  const std::unique_ptr<BodyCorrection> correction_;  // of the body's chunks, or null
  std::string held_;  // the head, until the first of these has come
  bool is_corrected_ = false;
  State state_ = State::kHead;
  std::string line_;   // the head, or the line with the size of a chunk, as far as it has come
  uint64_t left_ = 0;  // of the chunk, or of the body that is skipped
  std::string rest_;   // what is converted and not sent
  size_t owed_ = 0;    // bytes that are converted, which the front end believes to be not written
};

}  // namespace pytriton::guard
