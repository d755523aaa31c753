// What is wrong with a request to `generate`, in words: Triton's own front end speaks of its JSON library.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../refuse/request_text.h"

namespace pytriton::guard {

// An input or output of a model, as its configuration has it.
struct GenerateInput {
  std::string name;
  std::string type;           // "TYPE_FP32" and so on
  std::vector<int64_t> dims;  // with the batch in front, where the model has one
  bool is_batched = false;
  bool is_optional = false;
  std::string hint;  // what its author calls its type; empty where nobody said so

  // What is in the text of a string, by the hint of its author.
  enum class Json { kNone, kObject, kList };
  Json json() const {
    if (type != "TYPE_STRING") return Json::kNone;
    return hint.rfind("dict", 0) == 0 ? Json::kObject : hint.rfind("list[dict", 0) == 0 ? Json::kList : Json::kNone;
  }
  // Whether its author takes one value of bytes, as of a file.
  bool is_file() const {
    const auto own = dims.begin() + (is_batched ? 1 : 0);
    return type == "TYPE_STRING" && hint.find("bytes") != std::string::npos &&
           std::all_of(own, dims.end(), [](int64_t dim) { return dim == 1 || dim == -1; });
  }
};

// What a model takes and gives.
struct ModelInterface {
  std::vector<GenerateInput> inputs;
  std::vector<GenerateInput> outputs;
  bool is_decoupled = false;
};

// That of a model configuration in JSON; nothing where it cannot be read.
ModelInterface ReadInterface(std::string_view config);

// The names that stand in a request itself, and not among its `parameters`.
class OwnNames {
 public:
  OwnNames() = default;
  explicit OwnNames(const RequestText& body);
  bool Has(std::string_view name) const;
  size_t memory() const { return hashes_.capacity() * sizeof(size_t); }

 private:
  std::vector<size_t> hashes_;  // sorted: many names take less memory than the text that they are in
};

// A request to `generate` that Triton does not have yet.
struct GenerateRequest {
  std::string model;
  int64_t version = -1;  // the newest
  std::string endpoint;  // "generate" or "generate_stream"
  RequestText body;
  // Found at the first name that is no input: those that are to be refused.
  std::optional<OwnNames> own_names;

  size_t memory() const { return body.memory() + (own_names ? own_names->memory() : 0); }
};

// Says what is wrong with a request; empty where nothing is found. A name that is no input is a parameter for Triton;
// it is wrong only where `has_parameters` says that the model reads none.
std::string FindGenerateError(const GenerateRequest& request, const std::vector<GenerateInput>& inputs,
                              bool has_parameters);

}  // namespace pytriton::guard
