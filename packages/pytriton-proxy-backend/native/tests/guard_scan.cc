// The guard's scanners without a server. `guard_scan NAME` runs one test.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "../guard/limits.h"
#include "../guard/refuse/http_scan.h"
#include "../guard/refuse/json_scan.h"
#include "../guard/refuse/late_heads.h"
#include "../guard/refuse/shape_check.h"
#include "../proxy/text/printable.h"
#include "../proxy/wire/shared_limits.h"
#include "check.h"

// Of the sanitizer, which not every compiler has a header of.
extern "C" size_t __sanitizer_get_current_allocated_bytes();

using namespace pytriton::guard;

namespace {

constexpr uint64_t kPieces = 1000;
const std::string kPost = "POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\n";

bool Has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::string WithBody(const std::string& head, const std::string& body) {
  return head + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

// What becomes of bytes that arrive in pieces: how many requests end in them, and where, and the refusal.
struct Outcome {
  std::vector<size_t> ends;
  int status = 0;
  std::string text;
  std::string passed_on;  // the bytes as the server sees them
};

Outcome Read(std::string bytes, const std::vector<size_t>& cuts = {}, const Limits& limits = Limits()) {
  Outcome outcome;
  HttpScan scan;
  size_t at = 0;
  size_t next_cut = 0;
  while (at < bytes.size() && outcome.status == 0) {
    const size_t end = next_cut < cuts.size() ? cuts[next_cut++] : bytes.size();
    while (at < end && outcome.status == 0) {
      if (scan.complete()) scan.Begin();
      const size_t used = scan.Feed(&bytes[at], end - at, limits, kPieces);
      CHECK(used > 0 && used <= end - at);
      at += used;
      if (scan.complete()) outcome.ends.push_back(at);
      outcome.status = scan.refusal().status;
      outcome.text = scan.refusal().text;
    }
  }
  outcome.passed_on = bytes;
  return outcome;
}

void CheckTaken(const std::string& bytes) {
  const Outcome outcome = Read(bytes);
  if (outcome.status != 0) std::fprintf(stderr, "refused: %s\n", outcome.text.c_str());
  CHECK(outcome.status == 0 && outcome.ends == std::vector<size_t>{bytes.size()});
}

void CheckRefused(const std::string& bytes, int status, std::string_view text, const Limits& limits = Limits()) {
  const Outcome outcome = Read(bytes, {}, limits);
  if (outcome.status != status || !Has(outcome.text, text)) {
    std::fprintf(stderr, "expected %d with '%s', got %d with '%s'\n", status, std::string(text).c_str(), outcome.status,
                 outcome.text.c_str());
  }
  CHECK(outcome.status == status && Has(outcome.text, text));
  // The text stands in a JSON string of the answer.
  CHECK(outcome.text.find_first_of("\"\\\n\r") == std::string::npos);
}

// What is kept of a body is counted, handed over, and given back.
void KeptTexts() {
  const size_t before = __sanitizer_get_current_allocated_bytes();
  const auto taken = [&] { return __sanitizer_get_current_allocated_bytes() - before; };
  const std::string path = "POST /v2/models/m/generate HTTP/1.1\r\n";
  HttpScan scan;
  const auto read = [&](const std::string& from, size_t size, size_t left_out) {
    std::string text = WithBody(from, "[" + std::string(size, ' ') + "1]");
    CHECK(scan.Feed(text.data(), text.size() - left_out, Limits(), kPieces) == text.size() - left_out);
  };
  constexpr size_t kSize = 300'000;
  read(path, kSize, 0);
  CHECK(scan.complete() && scan.keeps_text());
  {
    const uint64_t counted = scan.memory();
    const RequestText text = scan.TakeText();
    CHECK(text.is_cut() && text.memory() >= RequestText::kMost && counted - scan.memory() >= RequestText::kMost);
  }
  CHECK(taken() < 2000 && scan.TakeText().text().empty());
  scan.Begin();
  // One whose caller leaves before its end.
  read(path, kSize, 1);
  CHECK(!scan.complete() && taken() >= RequestText::kMost);
  scan.Clear();
  CHECK(taken() < 100 && !scan.started());
  read(kPost, kSize, 0);
  CHECK(scan.complete() && !scan.keeps_text() && taken() < 2000);
}

void HeadsOfRequests() {
  CheckTaken("GET /v2 HTTP/1.1\r\n\r\n");
  CheckTaken("GET ?a HTTP/1.1\r\n\r\n");
  CheckTaken("\r\nGET /v2 HTTP/1.0\r\nA:\r\n\r\n");
  CheckTaken("GET http://h:1/v2?a=b%20c HTTP/1.1\r\nName: v\xc3\xa4lue\twith: all\r\n\r\n");
  CheckTaken(WithBody(kPost, "{}"));
  CheckTaken(kPost + "Accept-Encoding: gzip;q=0.5, deflate; q=1.000, *;q=0\r\n\r\n");

  // What the server does not serve is asked of it in another way, as many bytes long.
  const auto becomes = [](const std::string& asked, const std::string& passed_on) {
    const Outcome outcome = Read(asked + " HTTP/1.1\r\n\r\n");
    CHECK(outcome.status == 0 && outcome.passed_on == passed_on + " HTTP/1.1\r\n\r\n");
  };
  becomes("HEAD /v2", "GET /v2?");
  becomes("HEAD /v2?a", "GET /v2?a&");
  // To the server, `#` is a letter.
  becomes("HEAD /#a", "GET /#a?");
  becomes("OPTIONS /", "GET /?&&&");
  becomes("OPTIONS /v2/health/ready?a=b", "GET /v2/health/ready?a=b&&&&");
  becomes("OPTIONS /v2/models/m/ready", "GET /v2/models/m/ready?&&&");
  becomes("OPTIONS /v2/models/m/infer", "OPTIONS /v2/models/m/infer");
  becomes("HEAD http://h/v2", "GET http://h/v2?");
  becomes("HEAD http://h", "GET http://h/");
  becomes("OPTIONS http://h:1", "GET http://h:1/?&&");
  becomes("OPTIONS http://h/v2/health/ready", "GET http://h/v2/health/ready?&&&");
  CHECK(Read("HEAD /v2 HTTP/1.1\r\n\r\n", {2}).status == kNotAllowed);
  CheckRefused("GET /v2\r\n\r\n", 400, "expected METHOD PATH HTTP/1.1, got 'GET /v2'");
  CheckRefused("GET  /v2 HTTP/1.1\r\n\r\n", 400, "expected METHOD PATH");
  CheckRefused("GET /v2 HTTP/2.0\r\n\r\n", 400, "expected METHOD PATH");
  CheckRefused("CONNECT h:1 HTTP/1.1\r\n\r\n", 400, "expected METHOD PATH");
  CheckRefused("GET /v2 HTTP/1.1\n\r\n", 400, "does not end with CR LF");
  CheckRefused("GET /v2 HTTP/1.1\r\nA: b\n\r\n", 400, "does not end with CR LF");
  CheckRefused("GET /v\"2 HTTP/1.1\r\nA: \x01\r\n\r\n", 400, "control character");
  CheckRefused("GET /v2 HTTP/1.1\r\nA : b\r\n\r\n", 400, "expected 'Name: value'");
  CheckRefused("GET /v2 HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", 400, "expected 'Name: value'");
  CheckRefused("GET /v2 HTTP/1.1\r\nA: b\r\n\tfolded: c\r\n\r\n", 400, "expected 'Name: value'");
  CheckRefused("GET /" + std::string(9000, 'a') + " HTTP/1.1\r\n\r\n", 431, "8.0 KiB");
  std::string large = "GET /v2 HTTP/1.1\r\n";
  for (int i = 0; i < 20; ++i) large += "A: " + std::string(4000, 'b') + "\r\n";
  CheckRefused(large + "\r\n", 431, "64.0 KiB");
  std::string many = "GET /v2 HTTP/1.1\r\n";
  for (int i = 0; i < 501; ++i) many += "A: b\r\n";
  CheckRefused(many + "\r\n", 431, "more than 500 header fields");

  CheckRefused(kPost + "Content-Length: 1\r\ncontent-length: 1\r\n\r\n1", 400, "more than one header 'content-length'");
  CheckRefused(kPost + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "both a Content-Length and");
  CheckRefused(kPost + "Content-Length: 18446744073709551617\r\n\r\n", 400, "expected a number of bytes");
  CheckRefused(kPost + "Content-Length: +1\r\n\r\n1", 400, "expected a number of bytes");
  CheckRefused(kPost + "Content-Length: 2147483648\r\n\r\n", 413, "max_request_bytes");
  CheckRefused(kPost + "Inference-Header-Content-Length: 99999999999\r\n\r\n", 400, "expected a number of bytes");
  CheckRefused(kPost + "Inference-Header-Content-Length: 3\r\nContent-Length: 2\r\n\r\n{}", 400, "said to have more bytes");
  CheckRefused(kPost + "Inference-Header-Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400,
               "said to have more bytes than the body, which has 2");
  for (const char* weight : {"1e999", "1e-999", "0x1p9999", " 1e999", "inf", "", "0.123456789"}) {
    CheckRefused(kPost + "aCCept-enCoding: identity, gzip;q=" + weight + "\r\n\r\n", 400, "expected weights from 0 to 1");
  }
  // Where the server looks for exactly this, nothing else may count.
  for (const char* coding : {"CHUNKED", "chunkeD", "chunked ", "\tchunked", "gzip, chunked", "identity", ""}) {
    CheckRefused(kPost + "Transfer-Encoding: " + coding + "\r\n\r\n", 501, "expected 'chunked'");
  }
}

// A target may name scheme and host in front of the path that the server looks at.
void Targets() {
  const auto asked = [](const std::string& target, bool* is_page) {
    std::string bytes = "GET " + target + " HTTP/1.1\r\n\r\n";
    HttpScan scan;
    CHECK(scan.Feed(bytes.data(), bytes.size(), Limits(), kPieces) == bytes.size() && scan.complete());
    bool wants_html = false;
    *is_page = scan.AsksForPage(&wants_html);
    InferencePath found;
    return scan.FindInference(&found) ? found.model + " " + std::to_string(found.version) + " " + found.endpoint : "";
  };
  bool is_page = false;
  for (const char* place : {"", "http://h", "HTTPS://h.example:80", "x://[::1]:1", "http://"}) {
    for (const char* query : {"", "?", "?a=/b#c"}) {
      CHECK(asked(std::string(place) + "/v2/models/m/versions/2/generate" + query, &is_page) == "m 2 generate" && !is_page);
      CHECK(asked(std::string(place) + "/docs" + query, &is_page).empty() && is_page);
    }
  }
  CHECK(asked("http://h", &is_page).empty() && is_page && asked("http://h:1", &is_page).empty() && is_page);
  for (const char* none : {"http://h//v2/models/m/infer", "//v2/models/m/infer", "http://h?/v2/models/m/infer", "v2/models/m/infer",
                           "/http://h/v2/models/m/infer", "*"}) {
    CHECK(asked(none, &is_page).empty());
  }
  CHECK(asked("/v2/models/m#a/infer", &is_page) == "m#a -1 infer");
}

void BodiesInChunks() {
  const std::string head = kPost + "Transfer-Encoding: chunked\r\n\r\n";
  CheckTaken(head + "0\r\n\r\n");
  CheckTaken(head + "1\r\n{\r\n00A\r\n\"a\": [1]  \r\n01\r\n}\r\n0\r\n\r\n");
  CheckRefused(head + "\r\n", 400, "size of a chunk");
  CheckRefused(head + "1;a=b\r\n{\r\n", 400, "size of a chunk");
  CheckRefused(head + "-1\r\n", 400, "size of a chunk");
  CheckRefused(head + "1\r\n{}\r\n", 400, "longer than its size says");
  CheckRefused(head + "0\r\nTrailer: a\r\n\r\n", 400, "trailers");
  CheckRefused(head + "fffffffff\r\n", 413, "max_request_bytes");
  CheckRefused(head + std::string(40, '0'), 400, "a line of a chunked body");
  // Many small ones take far more memory than they have bytes.
  std::string ten = head;
  for (int i = 0; i < 10; ++i) ten += "1\r\n \r\n";
  HttpScan scan;
  scan.Feed(ten.data(), ten.size(), Limits(), kPieces);
  CHECK(scan.memory() > 10 * 1024);
  std::string small = head;
  for (uint64_t i = 0; i <= kPieces; ++i) small += "1\r\n \r\n";
  CheckRefused(small, 413, "pieces");
}

void DepthOfJson() {
  Limits limits;
  limits.max_json_depth = 10;
  const std::string fits(10, '[');
  const std::string deep(11, '[');
  const std::string generate = "POST /v2/models/m/generate HTTP/1.1\r\n";
  CHECK(Read(WithBody(kPost, fits), {}, limits).status == 0);
  const char* const kDeep = "nests deeper than 10 levels, the limit max_json_depth";
  CheckRefused(WithBody(kPost, deep), 400, kDeep, limits);
  CheckRefused(WithBody(kPost, "\xef\xbb\xbf \t\r\n" + deep), 400, kDeep, limits);
  CheckRefused(WithBody(generate, "{\"a\":\"\\\\\\\"[[[[\"," + std::string("\"b\":") + fits), 400, kDeep, limits);
  // Brackets in texts, and many of them one behind the other, nest nothing.
  CHECK(Read(WithBody(kPost, "{\"a\":\"" + deep + "\\\"" + deep + "\"}"), {}, limits).status == 0);
  std::string flat = "[";
  for (int i = 0; i < 100; ++i) flat += "[[]],{\"a\":{}},";
  CHECK(Read(WithBody(kPost, flat + "1]"), {}, limits).status == 0);
  // Tensors behind the JSON may hold anything; a path that takes none is read as JSON to the end of the first value.
  const std::string tensors = "{\"inputs\":[]}" + deep;
  CHECK(Read(WithBody(kPost + "Inference-Header-Content-Length: 13\r\n", tensors), {}, limits).status == 0);
  CHECK(Read(WithBody(kPost + "Inference-Header-Content-Length: 0\r\n", deep), {}, limits).status == 0);
  CheckRefused(WithBody(generate + "Inference-Header-Content-Length: 0\r\n", deep), 400, kDeep, limits);
  CheckRefused(WithBody("POST /v2/models/m/generate?/infer HTTP/1.1\r\nInference-Header-Content-Length: 0\r\n", deep), 400,
               kDeep, limits);
  // The server counts the bytes of texts in 32 bits with a sign.
  JsonScan texts;
  std::string problem;
  CHECK(texts.Feed("[\"\",\"\",\"\"", 9, 10, &problem));
  CHECK(!texts.MayOverflow(INT32_MAX - 3) && texts.MayOverflow(INT32_MAX - 2));
  std::string members = "{";
  for (int i = 0; i < 20000; ++i) members += "\"a\":1,";
  CheckRefused(WithBody(generate, members), 400, "members", limits);
}

// Which pieces the bytes come in makes no difference, whatever they are; and nothing is read out of bounds.
void EverySplit() {
  const std::string body = "{\"a\":\"\\\\\\\"\",\"b\":[[1],{}]}";
  const std::vector<std::string> streams = {
      WithBody(kPost + "Content-Type: application/json\r\nAccept-Encoding: gzip;q=0.5\r\n", body) + WithBody(kPost, body),
      kPost + "Transfer-Encoding: chunked\r\n\r\n5\r\n{\"a\":\r\n02\r\n1}\r\n0\r\n\r\nGET /v2 HTTP/1.1\r\n\r\n",
      kPost + "Content-Length: 1\r\nContent-Length: 1\r\n\r\n1",
      WithBody("POST /v2/models/m/generate HTTP/1.1\r\n", std::string(600, '[')),
      "GET /v2 HTTP/1.1\r\nA: b\n\r\n",
  };
  std::mt19937_64 random(1);
  for (const std::string& stream : streams) {
    const Outcome whole = Read(stream);
    std::vector<size_t> every;
    for (size_t i = 1; i < stream.size(); ++i) every.push_back(i);
    std::vector<std::vector<size_t>> splits = {every};
    for (const size_t cut : every) splits.push_back({cut});
    for (int i = 0; i < 200; ++i) {
      std::vector<size_t> some;
      for (const size_t cut : every) {
        if (random() % 7 == 0) some.push_back(cut);
      }
      splits.push_back(some);
    }
    for (const auto& cuts : splits) {
      const Outcome outcome = Read(stream, cuts);
      CHECK(outcome.ends == whole.ends && outcome.status == whole.status && outcome.text == whole.text);
    }
  }
  // Bytes of all kinds: no verdict is expected, only that there is one.
  for (int run = 0; run < 20000; ++run) {
    std::string stream = streams[random() % streams.size()];
    for (int i = 0; i < 3; ++i) stream[random() % stream.size()] = static_cast<char>(random());
    const size_t cut = random() % stream.size();
    CHECK(Read(stream, {cut}).ends == Read(stream).ends);
  }
}

// What a content type becomes that the server treats in its own way: nothing that it takes for it.
void Forms() {
  for (const std::string type : {"application/x-www-form-urlencoded", "multipart", "Multipart"}) {
    for (const char* more : {"", "; charset=utf-8"}) {
      const std::string stream = WithBody(kPost + "cOntent-type:  " + type + more + "\r\n", "a=b");
      for (size_t cut = 1; cut < stream.size(); ++cut) {
        for (size_t second : {cut, cut + 1, cut + 7}) {
          if (second >= stream.size()) continue;
          const Outcome outcome = Read(stream, {cut, second});
          CHECK(outcome.status == 0 && outcome.passed_on.size() == stream.size() && !Has(outcome.passed_on, type));
          CHECK(Has(outcome.passed_on, "a=b"));
        }
      }
    }
    // Anywhere else it is a text as any other.
    CHECK(Has(Read(WithBody(kPost + "X: " + type + "\r\n", type)).passed_on, type + "\r\n"));
  }
}

// The server's parser reads beyond a path that is not complete: how much of a first line has come.
void WithinThePath() {
  const auto cut = [](std::string bytes, int status = 0) {
    HttpScan scan;
    if (!bytes.empty()) scan.Feed(bytes.data(), bytes.size(), Limits(), kPieces);
    const size_t size = scan.LookAtCutLine();
    CHECK(scan.refusal().status == status);
    return size;
  };
  const std::string line = "GET /v2/health HTTP/1.1\r\n";
  for (size_t size = 0; size < line.size(); ++size) CHECK(cut(line.substr(0, size)) == size);
  CHECK(cut(line) == 0 && cut(line + "A: b") == 0 && cut("\r\nGE") == 2);
  // No first line begins so.
  CHECK(cut("\x16\x03\x01", 400) == 3 && cut("(a", 400) == 2 && cut("GET /\x01", 400) == 6 && cut(" GET", 400) == 4);
}

// Heads that do not come: each is late in its time, and one that is waited for may have more time.
void HeadsThatAreLate() {
  LateHeads heads;
  CHECK(heads.empty() && heads.Timeout(5, 100) == 5 && heads.Timeout(-1, 100) == -1);
  heads.Add(7, 1000);
  heads.Add(8, 1010);
  heads.Add(7, 1020);
  CHECK(heads.Timeout(-1, 400) == 601 && heads.Timeout(5, 400) == 5 && heads.Timeout(-1, 2000) == 0);
  std::vector<int> late;
  const auto end = [&](int fd) -> uint64_t {
    late.push_back(fd);
    return fd == 7 && late.size() == 1 ? 1500 : 0;
  };
  heads.EndLate(999, end);
  CHECK(late.empty());
  heads.EndLate(1010, end);
  CHECK((late == std::vector<int>{7, 8}) && !heads.empty() && heads.Timeout(-1, 1010) == 491);
  heads.EndLate(1500, end);
  CHECK(late.size() == 3 && heads.empty());
  // One that gets more time may still be late before others.
  heads.Add(7, 2000);
  heads.Add(8, 2500);
  heads.EndLate(2000, [](int) -> uint64_t { return 2100; });
  CHECK(heads.Timeout(-1, 2000) == 101);
  late.clear();
  heads.EndLate(2100, [&](int fd) -> uint64_t { return late.push_back(fd), 0; });
  CHECK(late == std::vector<int>{7} && heads.Timeout(-1, 2100) == 401);
}

void Shapes() {
  const auto check = [](std::vector<int64_t> shape, int type, uint64_t expected, std::string_view problem) {
    uint64_t bytes = 0;
    std::string error;
    const bool good = BytesOfShape("x", type, shape.data(), shape.size(), &bytes, &error);
    CHECK(good == problem.empty() && Has(error, problem) && (!good || bytes == expected));
  };
  constexpr int kFp32 = 11;
  check({}, kFp32, 4, "");
  check({2, 3}, kFp32, 24, "");
  check({2, 3}, pytriton::kBytesType, 24, "");
  check({1, 0, 5}, kFp32, 0, "");
  check({1, 1099511627776}, kFp32, 4398046511104, "");
  check({-1}, kFp32, 0, "no dimension of a request may be negative");
  check({1, INT64_MIN}, kFp32, 0, "negative");
  check({2147483648}, kFp32, 0, "first dimension");
  check({1, INT64_MAX}, kFp32, 0, "more than can be counted");
  check({0, INT64_MAX, INT64_MAX}, kFp32, 0, "more than can be counted");
  check({1, 4294967296, 4294967296}, 2, 0, "more than can be counted");
  check({5}, 99, 5, "");
}

void Settings() {
  Limits limits;
  std::string error;
  CHECK(ParseLimits("", &limits, &error) && limits.max_json_depth == Limits().max_json_depth);
  CHECK(ParseLimits("max_json_depth=7,,max_request_bytes=5", &limits, &error));
  CHECK(limits.max_json_depth == 7 && limits.max_request_bytes == 5);
  for (const char* wrong : {"depth=7", "max_json_depth", "max_json_depth=", "max_json_depth=-1", "max_json_depth=0",
                            "max_json_depth=99999999999999999999", "max_json_depth=7x"}) {
    CHECK(!ParseLimits(wrong, &limits, &error) && !error.empty());
  }
  CHECK(Bytes(1023) == "1023 bytes" && Bytes(3ull << 30) == "3.0 GiB");
  CHECK(MemoryOfThisMachine() > 1 << 20);
}

void Names() {
  CHECK(NameText("a\nW1126 pytriton guard] forged\x1b[2J") == "a\\nW1126 pytriton guard] forged\\x1b[2J");
  // What is no UTF-8, and a name that is cut within a character.
  CHECK(NameText("\x9b" "31m\xc3(\xff\xe2\x80") == "\\x9b31m\\xc3(\\xff\\xe2\\x80");
  CHECK(NameText((std::string(79, 'x') + "\xc3\xa4").c_str()) == std::string(79, 'x') + "\\xc3...");
  CHECK(NameText(std::string(81, 'x').c_str()) == std::string(80, 'x') + "...");
  CHECK(NameText("\xc3\xa4") == "\xc3\xa4" && NameText(nullptr).empty());
}

void Traces() {
  const std::string context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-";
  const auto seen = [](const std::string& header, bool makes_spans) {
    std::string bytes = WithBody(kPost + header + "\r\n", "{}");
    HttpScan scan;
    scan.set_makes_spans(makes_spans);
    size_t at = 0;
    while (at < bytes.size()) at += scan.Feed(&bytes[at], bytes.size() - at, Limits(), kPieces);
    CHECK(scan.complete() && scan.refusal().status == 0);
    return Has(bytes, "\r\n" + header + "\r\n");
  };
  for (const std::string& header : {"traceparent: " + context + "00", "TraceParent:" + context + "02 ",
                                   "traceparent: " + context + "fe", "traceparent: " + context + "00-more"}) {
    CHECK(!seen(header, true) && seen(header, false));
  }
  for (const std::string& header :
       {"traceparent: " + context + "01", "traceparent: " + context + "03", "traceparent: " + context + "0",
        "traceparent: " + context + "0x", "traceparent: " + context + "000", std::string("traceparent: 00-00-00-00"),
        std::string("traceparent:"), "tracestate: " + context + "00", "traceparents: " + context + "00"}) {
    CHECK(seen(header, true));
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc >= 2);
  const std::string name = argv[1];
  if (name == "heads") {
    HeadsOfRequests();
    Targets();
  } else if (name == "chunks") {
    BodiesInChunks();
  } else if (name == "depth") {
    DepthOfJson();
  } else if (name == "splits") {
    EverySplit();
    WithinThePath();
    HeadsThatAreLate();
  } else if (name == "kept") {
    KeptTexts();
  } else if (name == "forms") {
    Forms();
  } else if (name == "names") {
    Names();
  } else if (name == "traces") {
    Traces();
  } else if (name == "printable" && argc == 3) {
    std::ifstream file(argv[2], std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::fputs(pytriton::Printable(text).c_str(), stdout);
  } else if (name == "shapes") {
    Shapes();
  } else if (name == "settings") {
    Settings();
  } else {
    CHECK(!"a known test");
  }
  return 0;
}
