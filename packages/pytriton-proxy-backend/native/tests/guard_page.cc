// The page about a server: whatever models and tensors are called, no name becomes a part of the page or of a shell's line.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../guard/answers/page.h"
#include "../proxy/text/json_reader.h"
#include "check.h"

using namespace pytriton;
using namespace pytriton::guard;

namespace {

using Random = std::mt19937_64;

size_t Count(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

std::string Name(Random& random) {
  static const char* const kPieces[] = {"<script>", "</pre>", "'", "\"", "&", "\\", "a", "é", "\xff", "\n", "{{", "`", "$(id)", ";", "]]>"};
  std::string name;
  for (size_t i = 1 + random() % 4; i > 0; --i) name += kPieces[random() % (sizeof(kPieces) / sizeof(kPieces[0]))];
  return name;
}

ModelInterface Interface(Random& random) {
  static const char* const kTypes[] = {"TYPE_STRING", "TYPE_BOOL", "TYPE_FP32", "TYPE_FP16", "TYPE_INT8", "TYPE_<b>", ""};
  ModelInterface model;
  for (auto* tensors : {&model.inputs, &model.outputs}) {
    for (size_t i = random() % 3; i > 0; --i) {
      GenerateInput tensor;
      tensor.name = Name(random);
      tensor.type = kTypes[random() % 7];
      tensor.is_batched = random() % 2 == 0;
      if (tensor.is_batched) tensor.dims.push_back(-1);
      for (size_t j = random() % 3; j > 0; --j) tensor.dims.push_back(std::vector<int64_t>{-1, 0, 1, 3, INT64_MAX}[random() % 5]);
      tensor.is_optional = random() % 3 == 0;
      if (random() % 2 == 0) tensor.hint = random() % 2 == 0 ? Name(random) : "list[dict]";
      tensors->push_back(tensor);
    }
  }
  model.is_decoupled = random() % 2 == 0;
  return model;
}

void CheckPages(Random& random) {
  std::vector<PageModel> models(random() % 300);
  for (PageModel& model : models) model = {Name(random), {"1", Name(random)}, random() % 2 == 0, Interface(random)};
  const bool hides = random() % 4 == 0;
  const std::string page = PageAsHtml(models, Name(random), hides);
  // The tags are ours: as many as there are models.
  const size_t shown = std::min<size_t>(models.size(), 200);
  CHECK(Count(page, "<script") == 1 && Count(page, "<h2") <= shown + 1 && Count(page, "</pre>") == Count(page, "<pre>"));
  size_t names = 0;
  size_t ready = 0;
  std::string json = PageAsJson(models, hides);
  CHECK(JsonReader(json).Object([&](const std::string& member, std::string_view value) {
    if (member != "models") return;
    CHECK(JsonReader(value).Array([&](std::string_view model) {
      CHECK(JsonReader(model).Object([&](const std::string& name, std::string_view told) {
        names += name == "name";
        ready += name == "ready" && told == "true";
      }));
    }));
  }));
  CHECK(names == (hides ? 0 : shown) && ready <= names);
}

void CheckIndex() {
  const auto models = ReadIndex(R"([{"name":"b","version":"2","state":"READY"},{"name":"a","version":"1"},{"name":"b","version":"10"}])");
  CHECK(models.size() == 2 && models[0].name == "a" && models[1].versions == (std::vector<std::string>{"2", "10"}));
  CHECK(ReadIndex("").empty() && ReadIndex("[").empty() && ReadIndex("{}").empty());
}

// What a shell makes of the line is one argument.
void CheckLine() {
  ModelInterface model;
  GenerateInput input;
  input.name = "it's <here>";
  input.type = "TYPE_FP32";
  input.dims = {-1};
  model.inputs = {input};
  const std::string page = PageAsHtml({{"m/../x", {"1"}, true, model}}, "http://h", false);
  CHECK(page.find("/v2/models/m%2F..%2Fx/generate -d &#39;{&quot;it&#39;\\&#39;&#39;s &lt;here&gt;&quot;: [1.0, 2.0]}&#39;</pre>") != std::string::npos);
}

// Texts are made anew when they are old, by one caller; others get the old ones meanwhile, and wait for none.
void CheckCache() {
  int made = 0;
  const auto make = [&] { return PageTexts{"html " + std::to_string(++made), "json"}; };
  PageCache always{PageCache::Clock::duration::zero()};
  CHECK(always.Get(1, make)->html == "html 1" && always.Get(1, make)->html == "html 2");
  std::shared_ptr<const PageTexts> meanwhile;
  const auto texts = always.Get(1, [&] {
    std::thread([&] { meanwhile = always.Get(1, make); }).join();
    return make();
  });
  CHECK(meanwhile->html == "html 2" && texts->html == "html 3" && meanwhile->json == "json");
  // The time counts from when they are made, however long that took.
  PageCache seldom{std::chrono::hours(1)};
  CHECK(seldom.Get(1, make)->html == "html 4" && seldom.Get(2, make)->html == "html 5");
  CHECK(seldom.Get(1, make)->html == "html 4" && seldom.Get(2, make)->html == "html 5");
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  CheckIndex();
  CheckLine();
  CheckCache();
  Random random(std::strtoull(argv[1], nullptr, 10));
  for (int i = 0; i < 200; ++i) CheckPages(random);
  return 0;
}
