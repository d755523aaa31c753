// Responses that are corrected while they are written, in pieces of all sizes, to a caller who takes as much as he likes.

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "../guard/http_response.h"
#include "chance.h"
#include "check.h"

namespace {

using pytriton::guard::HttpResponse;

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
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    Chance chance(seed);
    CheckChunks(&chance);
    CheckStatus(&chance);
    CheckBody(&chance);
    CheckOthers(&chance);
  }
  return 0;
}
