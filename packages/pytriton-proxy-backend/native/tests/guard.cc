// The guard without a server: what it makes of requests, in whatever pieces they arrive, and of shapes and settings.
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../guard/http_scan.h"
#include "../guard/limits.h"
#include "../guard/shape_check.h"
#include "check.h"

using namespace pytriton::guard;

namespace {

constexpr uint64_t kPieces = 1000;

struct Seen {
  int status = 0;       // of a refusal
  size_t requests = 0;  // complete ones in front of it
  std::string bytes;    // what the server gets to see
};

Limits TestLimits() {
  Limits limits;
  limits.max_request_bytes = 1000;
  limits.max_json_depth = 8;
  return limits;
}

// Feeds a text in pieces of the given size, as reads of a socket would.
Seen Feed(std::string text, size_t piece) {
  HttpScan scan;
  Seen seen;
  for (size_t at = 0; at < text.size();) {
    if (scan.complete()) {
      ++seen.requests;
      scan.Begin();
    }
    const size_t size = std::min(piece, text.size() - at);
    const size_t used = scan.Feed(&text[at], size, TestLimits(), kPieces);
    CHECK(used <= size);
    if (scan.is_refused()) {
      CHECK(!scan.refusal().text.empty());
      seen.status = scan.refusal().status;
      break;
    }
    CHECK(used == size || scan.complete());
    at += used;
  }
  if (!scan.is_refused() && scan.complete()) ++seen.requests;
  seen.bytes = text;
  return seen;
}

// The verdict must not depend on how a request is cut.
void Expect(const std::string& text, int status, size_t requests, int line) {
  for (const size_t piece : {text.size(), size_t{1}, size_t{2}, size_t{3}, size_t{7}, size_t{64}}) {
    if (text.size() / piece > kPieces) continue;
    const Seen seen = Feed(text, piece);
    if (seen.status != status || seen.requests != requests) {
      std::fprintf(stderr, "line %d, pieces of %zu: expected %d and %zu requests, got %d and %zu, of: %.200s\n", line,
                   piece, status, requests, seen.status, seen.requests, text.c_str());
      std::exit(1);
    }
  }
}

#define EXPECT(text, status, requests) Expect(text, status, requests, __LINE__)

std::string Post(const std::string& path, const std::string& body, const std::string& headers = "") {
  return "POST " + path + " HTTP/1.1\r\nHost: x\r\n" + headers + "Content-Length: " + std::to_string(body.size()) +
         "\r\n\r\n" + body;
}

std::string Repeat(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

const char kInfer[] = "/v2/models/m/infer";
const char kGenerate[] = "/v2/models/m/generate";

void TestHonestRequests() {
  EXPECT("GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n", 0, 1);
  EXPECT("GET /v2?a=b HTTP/1.0\r\n\r\n", 0, 1);
  EXPECT("\r\n\r\nGET /v2 HTTP/1.1\r\nEmpty:\r\nAccept-Encoding: gzip, deflate;q=0.5, *;q=0\r\n\r\n", 0, 1);
  EXPECT(Post(kInfer, "{\"inputs\":[[[]]]}"), 0, 1);
  EXPECT(Post(kInfer, "{}") + Post(kInfer, "[[[[[[[[]]]]]]]]") + "GET / HTTP/1.1\r\n\r\n", 0, 3);
  // Brackets in strings and in tensors behind the JSON are data.
  EXPECT(Post(kInfer, "{\"a\":\"\\\\\\\"" + Repeat("[", 100) + "\"}"), 0, 1);
  EXPECT(Post(kInfer, "{}" + Repeat("[", 100), "inference-header-content-length: 2\r\n"), 0, 1);
  EXPECT(Post("http://h/v2/models/m/infer?x=1", "{}" + Repeat("[", 100), "Inference-Header-Content-Length:2\r\n"), 0, 1);
  EXPECT(Post("/invocations", "{}" + Repeat("[", 100),
              "Content-Type: application/vnd.sagemaker-triton.binary+json;json-header-size=2\r\n"),
         0, 1);
  // What comes out of compressed bytes is looked at elsewhere.
  EXPECT(Post(kInfer, Repeat("[", 100), "Content-Encoding: gzip\r\n"), 0, 1);
  EXPECT("POST /v2/models/m/infer HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\n{\"a\r\n00002\r\n\"}\r\n0\r\n\r\n", 0,
         1);
}

void TestDepth() {
  EXPECT(Post(kInfer, Repeat("[", 9)), 400, 0);
  EXPECT(Post(kInfer, Repeat("{\"a\":", 9)), 400, 0);
  EXPECT(Post(kInfer, "{}") + Post(kInfer, Repeat("[", 9)), 400, 1);
  EXPECT("POST /v2/models/m/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + Repeat("1\r\n[\r\n", 9), 400, 0);
  // Only inference takes tensors behind its JSON, and compressed bodies.
  EXPECT(Post(kGenerate, Repeat("[", 9), "Inference-Header-Content-Length: 0\r\n"), 400, 0);
  EXPECT(Post(kGenerate, Repeat("[", 9), "Content-Encoding: gzip\r\n"), 400, 0);
  EXPECT(Post("/models", Repeat("[", 9), "Content-Type: a;json-header-size=0\r\n"), 400, 0);
  EXPECT(Post(kInfer, Repeat("[", 9), "Content-Type: a;json-header-size=0\r\n"), 400, 0);
  EXPECT(Post("/predict", Repeat("[", 9),
              "X-Vertex-Ai-Triton-Redirect: v2/models/m/generate\r\nContent-Type: a;json-header-size=0\r\n"),
         400, 0);
}

void TestSizes() {
  EXPECT(Post(kInfer, std::string(1001, ' ')), 413, 0);
  EXPECT(Post(kInfer, std::string(1000, ' ')), 0, 1);
  EXPECT("POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", 400, 0);
  EXPECT("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, 0);
  EXPECT("POST / HTTP/1.1\r\nContent-Length: 0x5\r\n\r\n", 400, 0);
  EXPECT("POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400, 0);
  EXPECT("POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400, 0);
  EXPECT("POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501, 0);
  const std::string chunked = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
  EXPECT(chunked + "3e9\r\n", 413, 0);
  EXPECT(chunked + "fffffffffffffff\r\n", 413, 0);
  EXPECT(chunked + "ffffffffffffffffffff\r\n", 400, 0);
  EXPECT(chunked + "1;a=b\r\n", 400, 0);
  EXPECT(chunked + "1\r\nab\r\n", 400, 0);
  EXPECT(chunked + "0\r\nTrailer: x\r\n\r\n", 400, 0);
  EXPECT(chunked + "-1\r\n", 400, 0);
  EXPECT(chunked + Repeat("1\r\n \r\n", 600), 413, 0);
  EXPECT(Post(kInfer, "{}", "Inference-Header-Content-Length: 3\r\n"), 400, 0);
  EXPECT(Post(kInfer, "{}", "Inference-Header-Content-Length: 99999999999\r\n"), 400, 0);
  EXPECT("POST /v2/models/m/infer HTTP/1.1\r\nInference-Header-Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
         "2\r\n{}\r\n0\r\n\r\n",
         400, 0);
  EXPECT("GET /" + std::string(10000, 'a') + " HTTP/1.1\r\n\r\n", 431, 0);
  EXPECT("GET / HTTP/1.1\r\n" + Repeat("A: b\r\n", 501) + "\r\n", 431, 0);
}

void TestHeads() {
  for (const char* line : {"GET", "GET /", "GET / HTTP/2", "GET  / HTTP/1.1", "GET /a b HTTP/1.1", "G(T / HTTP/1.1",
                           "CONNECT a:1 HTTP/1.1", "GET /\x01 HTTP/1.1"}) {
    EXPECT(std::string(line) + "\r\n\r\n", 400, 0);
  }
  for (const char* header : {"A", "A : b", ": b", " folded", "A: \x01", "A: b\rC: d", "Accept-Encoding: gzip;q=1e999",
                             "Accept-Encoding: a;Q=-1", "Content-Type: a\r\nContent-Type: b"}) {
    EXPECT("GET / HTTP/1.1\r\n" + std::string(header) + "\r\n\r\n", 400, 0);
  }
  EXPECT("GET / HTTP/1.1\nA: b\n\n", 400, 0);
  EXPECT(std::string("GET / HTTP/1.1\r\nA: \0b\r\n\r\n", 24), 400, 0);
}

void TestForms() {
  const std::string type = "cONTENT-type:  application/X-WWW-form-urlencoded; charset=utf-8\r\n";
  const std::string request = Post(kInfer, "{}", type);
  for (size_t piece = 1; piece <= request.size(); ++piece) {
    const Seen seen = Feed(request, piece);
    CHECK(seen.status == 0 && seen.requests == 1);
    CHECK(seen.bytes.find("application/X-WWW-form-urlencodex") != std::string::npos);
    CHECK(seen.bytes.size() == request.size());
  }
  // Another header is left alone.
  const Seen other = Feed(Post(kInfer, "{}", "Accept: application/x-www-form-urlencoded\r\n"), 5);
  CHECK(other.bytes.find("urlencoded") != std::string::npos);
}

void TestDecoded() {
  std::string request = Post(kInfer, "zip", "Content-Encoding: gzip\r\nInference-Header-Content-Length: 4\r\n");
  HttpScan scan;
  scan.Feed(&request[0], request.size(), TestLimits(), kPieces);
  CHECK(scan.complete() && !scan.is_refused() && scan.is_compressed());
  const uint64_t before = scan.memory();
  scan.SetDecoded(104, 3);
  CHECK(scan.body_bytes() == 104 && scan.memory() > before + 104);
  // What comes out is followed apart from the request: to the end of the first value, and not into the tensors behind.
  const std::string tensor = Repeat("[", 100);
  std::string problem;
  JsonScan json;
  CHECK(json.Feed("[[]]", 4, 4, &problem) && json.Feed(tensor.data(), tensor.size(), 4, &problem));
  JsonScan deep;
  CHECK(!deep.Feed(tensor.data(), tensor.size(), 4, &problem) && !problem.empty());
}

void TestShapes() {
  uint64_t bytes = 0;
  std::string error;
  const auto good = [&](std::vector<int64_t> shape, int type) {
    CHECK(BytesOfShape("x", type, shape.data(), shape.size(), &bytes, &error));
    return bytes;
  };
  const auto bad = [&](std::vector<int64_t> shape) {
    error.clear();
    CHECK(!BytesOfShape("x", 11, shape.data(), shape.size(), &bytes, &error));
    CHECK(error.find("'x'") != std::string::npos);
  };
  CHECK(good({2, 3}, 11) == 24);
  CHECK(good({2, 3}, kTypeBytes) == 24);
  CHECK(good({}, 12) == 8);
  CHECK(good({0, 5}, 12) == 0);
  CHECK(good({1, 1099511627776}, 2) == 1099511627776);
  CHECK(good({1}, 99) == 1);
  bad({1, -1});
  bad({-4, -4});
  bad({1, INT64_MAX});
  bad({1, INT64_MAX, INT64_MAX});
  bad({1, 0, 1ll << 62, 1ll << 62});
  bad({1ll << 31});
}

void TestLimitsText() {
  Limits limits;
  std::string error;
  CHECK(ParseLimits("", &limits, &error));
  CHECK(ParseLimits("max_json_depth=3,max_request_bytes=10,,thread_stack_bytes=0", &limits, &error));
  CHECK(limits.max_json_depth == 3 && limits.max_request_bytes == 10 && limits.thread_stack_bytes == 0);
  for (const char* text : {"nonsense=1", "max_json_depth", "max_json_depth=", "max_json_depth=-1", "max_json_depth=0",
                           "max_json_depth=99999999999999999999", "max_json_depth=1k"}) {
    error.clear();
    CHECK(!ParseLimits(text, &limits, &error) && !error.empty());
  }
  CHECK(limits.max_json_depth == 3);
  CHECK(Bytes(90) == "90 bytes" && Bytes(3ull << 30) == "3.0 GiB");
  CHECK(MemoryOfThisMachine() > 1 << 20);
}

// Pieces of requests, joined and changed at random: the verdict is the same however they are cut, and nothing is read
// that is not there (which the sanitizers see).
void TestMutations(unsigned seed) {
  std::mt19937 random(seed);
  const std::vector<std::string> parts = {
      "POST /v2/models/m/infer HTTP/1.1\r\n", "GET / HTTP/1.1\r\n", "Content-Length: 5\r\n", "Content-Length: 700\r\n",
      "Transfer-Encoding: chunked\r\n", "Content-Type: application/x-www-form-urlencoded\r\n", "\r\n", "5\r\n", "0\r\n",
      "{\"a\":[1,2]}", "[[[", "\"\\\"", "\\", "Inference-Header-Content-Length: 2\r\n", "Content-Encoding: gzip\r\n",
      "hello", "\n", std::string(1, '\0'), "Accept-Encoding: gzip;q=0.1\r\n", "X: y\r\n"};
  for (int round = 0; round < 100000; ++round) {
    std::string text = random() % 2 == 0 ? parts[0] : "";
    for (unsigned i = random() % 12; i > 0; --i) text += parts[random() % parts.size()];
    if (random() % 2 == 0 && !text.empty()) text[random() % text.size()] = static_cast<char>(random());
    if (text.empty()) continue;
    const Seen whole = Feed(text, text.size());
    const Seen cut = Feed(text, 1 + random() % text.size());
    CHECK(whole.status == cut.status && whole.requests == cut.requests);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "mutations") {
    TestMutations(static_cast<unsigned>(std::atoi(argc > 2 ? argv[2] : "1")));
    return 0;
  }
  TestHonestRequests();
  TestDepth();
  TestSizes();
  TestHeads();
  TestForms();
  TestDecoded();
  TestShapes();
  TestLimitsText();
  return 0;
}
