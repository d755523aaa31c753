// Where the responses of a connection begin and end, whatever pieces they are written in.
#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "../guard/answers/http_answers.h"
#include "chance.h"
#include "check.h"

using namespace pytriton::guard;

namespace {

std::string Text(Chance* chance) {
  static const char* const kPieces[] = {"HTTP/1.1 200 OK\r\n", "\r\n", "\r\n\r\n", "0\r\n", "a", "Content-Length: 3\r\n"};
  std::string text;
  for (size_t i = chance->Below(8); i > 0; --i) text += kPieces[chance->Below(6)];
  if (chance->Below(10) == 0) text += std::string(chance->Below(100'000), 'x');
  return text;
}

struct Answer {
  std::string text;
  std::string status;  // empty: of one that announces another
};

Answer AnswerOf(Chance* chance) {
  if (chance->Below(8) == 0) return {"HTTP/1.1 100 Continue\r\n\r\n", ""};
  const bool is_good = chance->Below(2) == 0;
  const std::string status = is_good ? "200 OK" : "404 Not Found";
  std::string text = (chance->Below(2) == 0 ? "HTTP/1.1 " : "HTTP/1.0 ") + status + "\r\nContent-Type: text/plain\r\n";
  if (chance->Below(20) == 0) text += "Long: " + std::string(chance->Below(5000), 'y') + "\r\n";
  const std::string body = Text(chance);
  switch (chance->Below(3)) {
    case 0:
      return {text + "Content-Length: " + std::to_string(body.size()) + "\r\nInference-Header-Content-Length: 7\r\n\r\n" + body, status};
    case 1:
      return {text + "\r\n", status};
    default:
      // Callers of HTTP/1.0 get both.
      text += std::string(chance->Below(2) == 0 ? "" : "Content-Length: 0\r\n") + "Transfer-Encoding: chunked\r\n\r\n";
      for (size_t i = chance->Below(5); i > 0; --i) {
        const std::string chunk = "-" + Text(chance);
        char size[32];
        std::snprintf(size, sizeof(size), "%zx\r\n", chunk.size());
        text += size + chunk + "\r\n";
      }
      return {text + "0\r\n\r\n", status};
  }
}

// Writes as the hook does: up to the end of a response, as much as the system takes.
void CheckAnswers(Chance* chance) {
  std::vector<Answer> sent(1 + chance->Below(6));
  std::string all;
  std::vector<size_t> ends;
  for (Answer& answer : sent) {
    answer = AnswerOf(chance);
    all += answer.text;
    ends.push_back(all.size());
  }
  HttpAnswers answers;
  size_t done = 0;
  size_t begun = 0;
  size_t come = 0;
  while (done < all.size()) {
    if (come == done || chance->Below(2) == 0) come = std::min(all.size(), come + 1 + chance->Below(chance->Below(2) == 0 ? 300 : 100'000));
    const bool begins = answers.is_at_begin();
    // What begins one comes in one piece.
    if (begins) come = std::max(come, std::min(all.size(), done + 20));
    std::string piece = all.substr(done, come - done);
    const size_t cut = chance->Below(piece.size() + 1);
    const iovec parts[] = {{piece.data(), cut}, {nullptr, 0}, {piece.data() + cut, piece.size() - cut}};
    CHECK(begins == (done == 0 || std::find(ends.begin(), ends.end(), done) != ends.end()));
    if (begins) CHECK(StatusIn(parts, 3) == sent[begun++].status.substr(0, 6));
    CHECK(SizeOf(parts, 3) == piece.size());
    HttpAnswers behind = answers;
    const size_t most = behind.Feed(parts, piece.size());
    CHECK(most == std::min(piece.size(), *std::upper_bound(ends.begin(), ends.end(), done) - done));
    const auto first = FirstOf(parts, 3, most);
    CHECK(SizeOf(first.data(), static_cast<int>(first.size())) == most);
    const size_t taken = chance->Below(3) == 0 ? 1 + chance->Below(most) : most;
    if (taken < most) CHECK(answers.Feed(first.data(), taken) == taken);
    if (taken == most) answers = behind;
    done += taken;
  }
  CHECK(begun == sent.size() && answers.is_at_begin());
}

// What is no response ends the walk, and whatever follows changes nothing.
void CheckOthers(Chance* chance) {
  for (const std::string begin : {"\x16\x03\x01", "HTTP/2 200\r\n\r\n", "x", "HTTP/1.1\r\n\r\n"}) {
    HttpAnswers answers;
    CHECK(answers.Feed(begin) == begin.size());
    const std::string more = Text(chance) + "\r\n\r\n" + Text(chance);
    CHECK(answers.Feed(more) == more.size() && !answers.is_at_begin());
  }
  HttpAnswers endless;
  const std::string head = "HTTP/1.1 200 OK\r\nA: " + std::string(2 << 20, 'a');
  CHECK(endless.Feed(head) == head.size() && !endless.is_at_begin());
  HttpAnswers chunked;
  std::string odd = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n";
  CHECK(chunked.Feed(odd) == odd.size() && !chunked.is_at_begin());
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    Chance chance(seed);
    CheckAnswers(&chance);
  }
  Chance chance(7);
  CheckOthers(&chance);
  return 0;
}
