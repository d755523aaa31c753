// Responses that are corrected while they are written, in pieces of all sizes, to a caller who takes as much as he likes.

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../guard/answers/generate_answer.h"
#include "../guard/answers/http_response.h"
#include "chance.h"
#include "check.h"

namespace {

using pytriton::guard::FindRows;
using pytriton::guard::GenerateBody;
using pytriton::guard::GenerateResponses;
using pytriton::guard::HttpResponse;
using pytriton::guard::OutputRows;

struct Written {
  std::string text;
  bool is_at_end = false;
};

// Writes as libevent does: what was not taken comes again, and more of the response may have come meanwhile.
Written Write(HttpResponse* response, const std::string& given, Chance* chance) {
  Written written;
  const auto send = [&](const char* data, size_t size) -> ssize_t {
    const size_t taken = chance->Below(4) == 0 ? 0 : std::min(size, 1 + chance->Below(chance->Below(2) == 0 ? 8 : 70'000));
    if (taken == 0) {
      errno = EAGAIN;
      return -1;
    }
    written.text.append(data, taken);
    return static_cast<ssize_t>(taken);
  };
  size_t done = 0;
  size_t come = 0;
  while (done < given.size()) {
    if (come == done || chance->Below(2) == 0) come = std::min(given.size(), come + 1 + chance->Below(100'000));
    std::string piece = given.substr(done, come - done);
    const size_t cut = chance->Below(piece.size() + 1);
    const iovec parts[] = {{piece.data(), cut}, {piece.data() + cut, piece.size() - cut}};
    const ssize_t size = response->Write(parts, 2, send);
    CHECK(size <= static_cast<ssize_t>(piece.size()) && size != 0);
    if (size < 0) CHECK(errno == EAGAIN);
    done += static_cast<size_t>(std::max<ssize_t>(size, 0));
    if (response->is_at_end()) written.is_at_end = true;
  }
  return written;
}

std::string Text(Chance* chance) {
  std::string text(chance->Below(3) == 0 ? chance->Below(200'000) : chance->Below(20), 'x');
  for (char& byte : text) byte = "\r\n0a:"[chance->Below(5)];
  return text;
}

void CheckChunks(Chance* chance) {
  const bool has_continue = chance->Below(3) == 0;
  const bool keeps = chance->Below(2) == 0;
  const std::string begin = has_continue ? "HTTP/1.1 100 Continue\r\n\r\n" : "";
  const std::string type = "Content-Type: text/event-stream\r\n";
  std::string given = begin + "HTTP/1.0 400 Bad Request\r\n" + type + "Transfer-Encoding: chunked\r\n" +
                      (keeps ? "Connection: keep-alive\r\n" : "") + "\r\n";
  std::string joined;
  for (size_t i = chance->Below(6); i > 0; --i) {
    const std::string text = "-" + Text(chance);
    char size[32];
    std::snprintf(size, sizeof(size), chance->Below(2) == 0 ? "%zx\r\n" : "%zX\r\n", text.size());
    given += size + text + "\r\n";
    joined += text;
  }
  given += "0\r\n\r\n";
  const bool is_right = chance->Below(2) == 0;
  HttpResponse response(is_right ? "" : "503 Service Unavailable", true);
  const Written written = Write(&response, given, chance);
  const std::string status = is_right ? "400 Bad Request" : "503 Service Unavailable";
  CHECK(written.text == begin + "HTTP/1.0 " + status + "\r\n" + type + "\r\n" + joined);
  CHECK(written.is_at_end && !response.is_done());
}

void CheckStatus(Chance* chance) {
  const std::string body = Text(chance);
  const std::string rest = "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
                           "\r\nConnection: keep-alive\r\n\r\n" + body;
  HttpResponse response("400 Bad Request", chance->Below(2) == 0);
  const Written written = Write(&response, "HTTP/1.1 500 Internal Server Error" + rest, chance);
  CHECK(written.text == "HTTP/1.1 400 Bad Request" + rest);
  CHECK(!written.is_at_end && response.is_done());
}

// Another body in place of the front end's, between what comes before and behind it.
void CheckBody(Chance* chance) {
  const std::string body = Text(chance);
  const std::string head = "HTTP/1.1 500 Internal Server Error\r\nContent-Type: text/plain\r\nContent-Length: " +
                           std::to_string(body.size()) + "\r\nConnection: keep-alive\r\n\r\n";
  HttpResponse response("400 Bad Request", chance->Below(2) == 0, "{\"error\":1}", "Allow: POST\r\n");
  const std::string next = chance->Below(2) == 0 ? "" : "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
  const Written written = Write(&response, head + body + next, chance);
  CHECK(written.text == "HTTP/1.1 400 Bad Request\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
                        "Content-Length: 11\r\nAllow: POST\r\n\r\n{\"error\":1}" + next);
  CHECK(!written.is_at_end && response.is_done());
}

// What has no length, or is compressed, stays as it is, and so does its status.
void CheckOthers(Chance* chance) {
  static const char* const kLines[] = {"", "Content-Encoding: gzip\r\nContent-Length: 3\r\n", "Transfer-Encoding: chunked\r\n"};
  const std::string given = std::string("HTTP/1.0 404 Not Found\r\n") + kLines[chance->Below(3)] + "\r\n3\r\n";
  HttpResponse response("200 OK", false, "{}", "Vary: Accept\r\n");
  CHECK(Write(&response, given, chance).text == given && response.is_done());
}

// A caller of HTTP/1.0 that keeps its connection would wait for a body whose length is not said, as would one of OPTIONS for
// the body that is left out.
void CheckNoBody(Chance* chance) {
  const std::string head = "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n";
  HttpResponse unsaid("", true);
  CHECK(Write(&unsaid, head + "\r\n", chance).text == head + "Content-Length: 0\r\n\r\n" && unsaid.is_done());
  for (const bool is_head : {true, false}) {
    HttpResponse without("", chance->Below(2) == 0);
    without.LeaveOutBody(is_head);
    const std::string length = is_head ? "4" : "0";
    CHECK(Write(&without, head + "Content-Length: 4\r\n\r\nbody", chance).text ==
          head + "Content-Length: " + length + "\r\n\r\n");
    CHECK(without.is_done());
  }
}

std::string Chunk(const std::string& text) {
  char size[32];
  std::snprintf(size, sizeof(size), "%zx\r\n", text.size());
  return size + text + "\r\n";
}

// The text of chunks, whatever their sizes.
std::string Join(std::string_view chunks) {
  std::string text;
  for (;;) {
    const size_t end = chunks.find("\r\n");
    CHECK(end != std::string_view::npos);
    const size_t size = std::stoul(std::string(chunks.substr(0, end)), nullptr, 16);
    text += chunks.substr(end + 2, size);
    CHECK(chunks.substr(end + 2 + size, 2) == "\r\n");
    chunks.remove_prefix(end + 2 + size + 2);
    if (size == 0) return text + std::string(chunks);
  }
}

// An answer to `generate`: the lists of samples are divided, and what else there is stays.
void CheckRows(Chance* chance) {
  static const char* const kElements[] = {"1", "-0.5", "\"],[\"", "\"\\\"[\\\\\"", "NaN", "true"};
  const std::string other = "\"a\":\"out\",\"b\":[1,2,3,4],\"c\\\"[\":{\"out\":[5,6]},\"out\":";
  OutputRows rows{"out", 2 + chance->Below(4), chance->Below(4)};
  std::string list;
  std::string divided;
  for (uint64_t row = 0; row < rows.rows; ++row) {
    divided += row == 0 ? "[" : ",[";
    for (uint64_t i = 0; i < rows.row_size; ++i) {
      const std::string element = kElements[chance->Below(6)];
      list += (list.empty() ? "" : ",") + element;
      divided += (i == 0 ? "" : ",") + element;
    }
    divided += "]";
  }
  const bool joins = chance->Below(2) == 0;
  const bool is_wrong = chance->Below(3) == 0;
  HttpResponse response(std::make_unique<GenerateBody>(std::vector<OutputRows>{rows}, [&] {
    return is_wrong ? GenerateBody::Ending{"503 Service Unavailable", "{}"} : GenerateBody::Ending{};
  }), joins);
  const std::string text = "{" + other + "[" + list + "],\"z\":[7,8]}";
  const size_t cut = chance->Below(text.size() - 1) + 1;
  const std::string head = "\r\nTransfer-Encoding: chunked\r\n\r\n";
  const Written written = Write(&response, "HTTP/1.1 200 OK" + head + Chunk(text.substr(0, cut)) + 
                                (cut < text.size() ? Chunk(text.substr(cut)) : "") + "0\r\n\r\n", chance);
  const std::string right = is_wrong ? "{}" : "{" + other + "[" + divided + "],\"z\":[7,8]}";
  const std::string begin = (is_wrong ? "HTTP/1.1 503 Service Unavailable" : "HTTP/1.1 200 OK") + (joins ? "\r\n\r\n" : head);
  CHECK(written.text.substr(0, begin.size()) == begin);
  CHECK((joins ? written.text.substr(begin.size()) : Join(written.text.substr(begin.size()))) == right);
  CHECK(written.is_at_end == joins && response.is_done() == !joins);
}

void CheckFindRows() {
  OutputRows rows;
  const int64_t shape[] = {2, 3, 4};
  CHECK(FindRows("a", shape, 3, 2, &rows) && rows.name == "a" && rows.rows == 2 && rows.row_size == 12);
  const int64_t empty[] = {2, 0};
  CHECK(FindRows("a", empty, 2, 2, &rows) && rows.row_size == 0);
  const int64_t scalars[] = {2, 1, 1};
  const int64_t large[] = {2, int64_t{1} << 62, 16};
  const int64_t wrong[] = {2, -1};
  CHECK(!FindRows("a", scalars, 3, 2, &rows) && !FindRows("a", large, 3, 2, &rows));
  CHECK(!FindRows("a", shape, 1, 2, &rows) && !FindRows("a", shape, 0, 2, &rows) && !FindRows("a", wrong, 2, 2, &rows));
  // Rows that are not the samples: of one sample, which has three of them, and as many as no request has.
  const int64_t many[] = {1'000'000'000, 0};
  const int64_t lone[] = {1, 3};
  CHECK(!FindRows("a", lone, 2, 1, &rows) && !FindRows("a", shape, 3, 1, &rows) && !FindRows("a", shape, 3, 3, &rows));
  CHECK(!FindRows("a", many, 2, 2, &rows) && !FindRows("a", wrong + 1, 1, 2, &rows));
}

void CheckResponses() {
  GenerateResponses responses("m", 0, true);
  CHECK(responses.FindError().find("gave no response") != std::string::npos);
  CHECK(responses.Add({}) && responses.FindError().empty());
  // It was ended for the second, which is no error of its own.
  CHECK(!responses.Add({}) && !responses.Add({}));
  responses.AddError("cancelled");
  CHECK(responses.FindError().find("gave more than one response") != std::string::npos);
  GenerateResponses failed("m", 0, true);
  CHECK(failed.Add({}));
  failed.AddError("first");
  failed.AddError("second");
  CHECK(failed.FindError() == "first");
  // Of others Triton itself says when there are several.
  GenerateResponses whole("m", 2, false);
  CHECK(whole.Add({}) && whole.Add({}));
  GenerateResponses silent("m", 0, true);
  CHECK(silent.Add({}));
  silent.AddError("");
  CHECK(!silent.FindError().empty());
}

// A caller who has gone is an error of the system, which the front end is to see.
void CheckGone() {
  HttpResponse response("400 Bad Request", false);
  std::string text = "HTTP/1.1 500 Internal Server Error\r\n\r\n";
  const iovec parts[] = {{text.data(), text.size()}};
  const auto send = [](const char*, size_t) -> ssize_t {
    errno = EPIPE;
    return -1;
  };
  CHECK(response.Write(parts, 1, send) == -1 && errno == EPIPE);
}

}  // namespace

int main() {
  CheckGone();
  CheckFindRows();
  CheckResponses();
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    Chance chance(seed);
    CheckChunks(&chance);
    CheckStatus(&chance);
    CheckBody(&chance);
    CheckOthers(&chance);
    CheckNoBody(&chance);
    CheckRows(&chance);
  }
  return 0;
}
