// Describes what is wrong with a request to `generate`; Triton's own front end only passes errors of its JSON library
// on.
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

// An input or output of a model, from its configuration.
struct GenerateInput {
  std::string name;
  std::string type;           // "TYPE_FP32" and so on
  std::vector<int64_t> dims;  // with the batch axis first, if the model has one
  bool is_batched = false;
  bool is_optional = false;
  std::string hint;  // the type hint of its author; "" if unknown

  // What the text of a string holds, according to its author's hint.
  enum class Json { kNone, kObject, kList };
  Json json() const {
    if (type != "TYPE_STRING") return Json::kNone;
    return hint.rfind("dict", 0) == 0 ? Json::kObject : hint.rfind("list[dict", 0) == 0 ? Json::kList : Json::kNone;
  }
  // Whether its author takes one value of bytes, such as the content of a file.
  bool is_file() const {
    const auto own = dims.begin() + (is_batched ? 1 : 0);
    return type == "TYPE_STRING" && hint.find("bytes") != std::string::npos &&
           std::all_of(own, dims.end(), [](int64_t dim) { return dim == 1 || dim == -1; });
  }
};

// The inputs and outputs of a model.
struct ModelInterface {
  std::vector<GenerateInput> inputs;
  std::vector<GenerateInput> outputs;
  bool is_decoupled = false;
};

// Reads them from a model configuration in JSON; empty if it cannot be read.
ModelInterface ReadInterface(std::string_view config);

// The names that stand in a request itself, not in its `parameters`.
class OwnNames {
 public:
  OwnNames() = default;
  explicit OwnNames(const RequestText& body);
  bool Has(std::string_view name) const;
  size_t memory() const { return hashes_.capacity() * sizeof(size_t); }

 private:
  std::vector<size_t> hashes_;  // sorted; hashes take less memory than the text with the names
};

// A request to `generate` that Triton does not have yet.
struct GenerateRequest {
  std::string model;
  int64_t version = -1;  // -1 for the newest
  std::string endpoint;  // "generate" or "generate_stream"
  RequestText body;
  // The names that may be refused. They are looked for when the first name comes that is no input.
  std::optional<OwnNames> own_names;

  size_t memory() const { return body.memory() + (own_names ? own_names->memory() : 0); }
};

// Describes what is wrong with a request; "" if nothing is found. Triton takes a name that is no input for a parameter,
// so it is an error only if `has_parameters` says that the model reads none.
std::string FindGenerateError(const GenerateRequest& request, const std::vector<GenerateInput>& inputs,
                              bool has_parameters);

}  // namespace pytriton::guard
