// What is said of requests to `generate` that Triton refuses. `texts`: requests in pieces of all sizes. `fuzz SEED COUNT`:
// whatever comes, in memory of exactly its size; the sanitizers watch.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "../guard/answers/generate_errors.h"
#include "../proxy/text/json_reader.h"
#include "../proxy/text/utf8.h"
#include "check.h"

using namespace pytriton;
using namespace pytriton::guard;

namespace {

using Random = std::mt19937_64;

constexpr char kConfig[] =
    R"({"name":"m","max_batch_size":8,"input":[{"name":"text","data_type":"TYPE_STRING","dims":[1]},)"
    R"({"name":"times","data_type":"TYPE_INT64","dims":[1],"optional":true},{"name":"x","data_type":"TYPE_FP32",)"
    R"("dims":[3],"optional":true},{"name":"h","data_type":"TYPE_FP16","dims":[2],"optional":true}],"output":[]})";

GenerateRequest RequestOf(std::string_view text, Random* random) {
  GenerateRequest request;
  request.model = "m";
  request.endpoint = "generate";
  while (!text.empty()) {
    const size_t size = random == nullptr ? text.size() : 1 + (*random)() % text.size();
    const std::unique_ptr<char[]> piece(new char[size]);
    std::memcpy(piece.get(), text.data(), size);
    request.body.Add(piece.get(), size);
    text.remove_prefix(size);
  }
  return request;
}

std::string ErrorOf(std::string_view text, bool has_parameters = false) {
  return FindGenerateError(RequestOf(text, nullptr), ReadInterface(kConfig).inputs, has_parameters);
}

void CheckHints() {
  const ModelInterface model = ReadInterface(
      R"({"name":"m","input":[{"name":"a","data_type":"TYPE_STRING","dims":[1]},{"name":"b","data_type":"TYPE_STRING",)"
      R"("dims":[1]},{"name":"c","data_type":"TYPE_FP32","dims":[1]}],"output":[{"name":"a","data_type":"TYPE_BOOL",)"
      R"("dims":[1]}],"parameters":{"x":{"string_value":"y"},"pytriton_hints":{"string_value":)"
      R"("{\"inputs\":{\"a\":\"dict\",\"b\":\"list[dict]\",\"d\":\"str\"},\"outputs\":{\"a\":\"bool\"}}"}}})");
  CHECK(model.inputs[0].hint == "dict" && model.inputs[1].hint == "list[dict]" && model.inputs[2].hint.empty());
  CHECK(model.outputs[0].hint == "bool" && model.outputs[0].json() == GenerateInput::Json::kNone);
  GenerateRequest request = RequestOf(R"({"a":{"b":1},"b":"[]","c":1})", nullptr);
  CHECK(FindGenerateError(request, model.inputs, false) ==
        "the input 'a' takes a string, the text of a JSON object, got an object");
  // Whatever somebody else wrote there.
  for (const char* const text : {"5", "\"\"", "\"[\"", "{\"string_value\":7}", "{\"string_value\":\"{\\\"inputs\\\":[\\\"a\\\"]}\"}"}) {
    const std::string config = std::string(kConfig).insert(1, std::string("\"parameters\":{\"pytriton_hints\":") + text + "},");
    const ModelInterface odd = ReadInterface(config);
    CHECK(odd.inputs.size() == 4 && odd.inputs[0].hint.empty());
  }
}

void CheckTexts() {
  const auto inputs = ReadInterface(kConfig).inputs;
  CHECK(inputs.size() == 4 && inputs[2].dims == (std::vector<int64_t>{-1, 3}) && inputs[1].is_optional);
  CHECK(inputs[0].name == "text" && inputs[0].type == "TYPE_STRING" && !inputs[0].is_optional);
  const auto begins = [](const std::string& text, std::string_view with) { return text.rfind(with, 0) == 0; };
  CHECK(ErrorOf(R"({"text":"a"})").empty());
  CHECK(ErrorOf(R"({"text":["a","b"],"x":[1,2e3,-3,4,5,6.5],"times":[1,2]})").empty());
  CHECK(begins(ErrorOf(R"({"text":5})"), "the input 'text' takes a string, got the number 5"));
  CHECK(begins(ErrorOf(R"({"text":"a","x":[1,2]})"), "the input 'x' has 2 values, and its shape is [-1, 3]"));
  CHECK(begins(ErrorOf(R"({"text":"a","x":[[1,2,3]]})"), "the input 'x' is a list of lists"));
  CHECK(begins(ErrorOf(R"({"text":"a","times":[1,1.5]})"), "the input 'times' takes whole numbers, got the number 1.5 at index 1"));
  CHECK(begins(ErrorOf(R"({"text":"a","h":[1,2]})"), "the input 'h' is of FP16, which JSON cannot hold"));
  CHECK(begins(ErrorOf(R"({"txet":"a"})"), "'txet' is no input of the model 'm': did you mean 'text'?"));
  CHECK(begins(ErrorOf(R"({"te\u0078t":"a"})"), ""));
  CHECK(begins(ErrorOf(R"({"parameters":{"text":7}})"), "the input 'text' takes a string"));
  CHECK(ErrorOf(R"({"text":"a","parameters":{"tiems":7},"id":"1"})").empty());
  CHECK(begins(ErrorOf(R"({"text":"a","tiems":7})"), "'tiems' is no input of the model 'm': did you mean 'times'?"));
  CHECK(ErrorOf(R"({"text":"a","tiems":7})", true).empty());
  CHECK(begins(ErrorOf(R"({"zzzzzz":1,"qqqqqq":2})"), "the input 'text' is missing; got 'zzzzzz', 'qqqqqq'."));
  CHECK(begins(ErrorOf("[1]"), "expected a JSON object with the inputs, got a list"));
  CHECK(begins(ErrorOf(""), "expected a JSON object with the inputs, got no body"));
  const std::string file = "expected a JSON object with the inputs, got the bytes of a file, or a form. The model takes ";
  for (const std::string_view body : {std::string_view("\xff\xd8\xff\xe0\0\x10JFIF", 10), std::string_view("\x89PNG\r\n\x1a\n"),
                                      std::string_view("--------a\r\nContent-Disposition: form-data; name=\"image\"")}) {
    CHECK(begins(ErrorOf(std::string(body)), file));
  }
  // Slips in JSON are Triton's to tell.
  for (const char* body : {"'text': 1", "text=a", "\"text\"", "5"}) CHECK(ErrorOf(body).empty());
  // What is no JSON is Triton's to tell.
  for (const char* text : {"{", R"({"text")", R"({"text":)", R"({"text":5)", "nonsense", R"({"text":"a)"}) {
    CHECK(ErrorOf(text).empty());
  }
}

// Names among the parameters are the caller's own, whatever they are.
void CheckOwnNames() {
  const OwnNames names(RequestOf(R"({"text":"a","id":"1","parameters":{"parameters":1,"id":2,"b":3},"c\u0064":[{"e":1}]})", nullptr).body);
  CHECK(names.Has("text") && names.Has("cd"));
  for (const char* name : {"parameters", "id", "b", "e", ""}) CHECK(!names.Has(name));
  // What is kept of the names is less than the text, or of its size.
  std::string many = "{";
  while (many.size() < RequestText::kMost) many += "\"" + std::to_string(many.size()) + "\":1,";
  const GenerateRequest request = RequestOf(many, nullptr);
  const OwnNames kept(request.body);
  CHECK(kept.Has("1") && !kept.Has("2") && kept.memory() <= 2 * RequestText::kMost);
}

// The same is kept, whatever the pieces; long strings as their begin.
void CheckPieces(Random& random) {
  const std::string image(1 + random() % 100'000, 'A');
  std::string text = R"({"image":")" + image + R"(","tail":"\\\"\u00e9","txet":"b"})";
  const GenerateRequest whole = RequestOf(text, nullptr);
  const GenerateRequest pieces = RequestOf(text, &random);
  CHECK(whole.body.text() == pieces.body.text() && !whole.body.is_cut());
  CHECK(whole.body.text().size() < RequestText::kMostOfString + 100);
  const OwnNames names(whole.body);
  CHECK(names.Has("txet") && names.Has("tail") && !names.Has("text") && !OwnNames().Has("txet"));
  CHECK(FindGenerateError(whole, ReadInterface(kConfig).inputs, true).rfind("'txet' is no input", 0) == 0);
  std::string list = R"({"txet":"b","x":[)";
  while (list.size() < RequestText::kMost) list += "1.25,";
  const GenerateRequest cut = RequestOf(list + "1]}", &random);
  CHECK(cut.body.is_cut() && cut.body.text().size() == RequestText::kMost);
  // Who knows what follows: nothing is said to be missing.
  CHECK(FindGenerateError(cut, ReadInterface(kConfig).inputs, true).empty());
}

void Fuzz(Random& random) {
  static const char* const kPieces[] = {"{", "}", "[", "]", ":", ",", "\"text\"", "\"times\"", "\"x\"", "\"parameters\"",
                                        "\"", "\\", "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "\\u12", "null", "true", "-1.5e9",
                                        "NaN", "\xff", "\xe2\x82\xac", "\0", " ", "\"id\"", "\"\\\"\"", "18446744073709551616"};
  std::string text = random() % 2 == 0 ? "" : R"({"text":"a","times":[1,2],"x":[1,2,3],"parameters":{"y":1}})";
  for (size_t i = random() % 40; i > 0; --i) {
    const std::string piece = kPieces[random() % (sizeof(kPieces) / sizeof(kPieces[0]))];
    text.insert(text.empty() ? 0 : random() % text.size(), piece);
  }
  if (random() % 50 == 0) text = std::string(random() % 300'000, "[{\""[random() % 3]) + text;
  const GenerateRequest request = RequestOf(text, &random);
  const std::string error = FindGenerateError(request, ReadInterface(kConfig).inputs, random() % 2 == 0);
  const std::string json = JsonString(error);
  CHECK(error.size() < 4000 && pytriton::IsUtf8(json));
  // What is said is one string of JSON, and reads as it was.
  std::string read;
  CHECK(JsonReader(json).String(&read));
  if (pytriton::IsUtf8(error)) CHECK(read == error);
  OwnNames(request.body).Has("text");
  // A configuration is Triton's, and not trusted either.
  std::string config = kConfig;
  for (size_t i = random() % 4; i > 0; --i) config[random() % config.size()] = static_cast<char>(random());
  config.resize(random() % 3 == 0 ? random() % config.size() : config.size());
  const std::unique_ptr<char[]> block(new char[config.size()]);
  std::memcpy(block.get(), config.data(), config.size());
  FindGenerateError(request, ReadInterface({block.get(), config.size()}).inputs, false);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc >= 2);
  if (std::string_view(argv[1]) == "texts") {
    CheckTexts();
    CheckHints();
    CheckOwnNames();
    Random random(1);
    for (int i = 0; i < 50; ++i) CheckPieces(random);
    return 0;
  }
  CHECK(argc == 4);
  Random random(std::strtoull(argv[2], nullptr, 10));
  for (long i = std::atol(argv[3]); i > 0; --i) Fuzz(random);
  return 0;
}
