#include "generate_errors.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <utility>

#include "../../proxy/text/json_reader.h"
#include "../../proxy/text/printable.h"

namespace pytriton::guard {
namespace {

// An error shows at most so many bytes of a caller's text, and so many names of a list.
constexpr size_t kMostShown = 60;
constexpr size_t kMostNames = 12;
// Longer names are not compared with others.
constexpr size_t kMostLetters = 64;
constexpr size_t kMostOfHint = 400;

std::string Name(std::string_view name) {
  const bool is_long = name.size() > kMostLetters;
  return "'" + Printable(name.substr(0, kMostLetters)) + (is_long ? "...'" : "'");
}

std::string Count(uint64_t count, const char* one, const char* many) {
  return std::to_string(count) + " " + (count == 1 ? one : many);
}

enum class Kind { kText, kBool, kInteger, kPositive, kNumber, kNone };

Kind KindOf(std::string_view type) {
  if (type == "TYPE_STRING") return Kind::kText;
  if (type == "TYPE_BOOL") return Kind::kBool;
  if (type.substr(0, 8) == "TYPE_INT") return Kind::kInteger;
  if (type.substr(0, 9) == "TYPE_UINT") return Kind::kPositive;
  return type == "TYPE_FP32" || type == "TYPE_FP64" ? Kind::kNumber : Kind::kNone;
}

const char* One(Kind kind) {
  switch (kind) {
    case Kind::kText: return "a string";
    case Kind::kBool: return "true or false";
    case Kind::kInteger: return "a whole number";
    case Kind::kPositive: return "a whole number of at least 0";
    case Kind::kNumber: return "a number";
    default: return "a tensor that JSON cannot hold";
  }
}

const char* Many(Kind kind) {
  switch (kind) {
    case Kind::kText: return "strings";
    case Kind::kBool: return "true or false";
    case Kind::kInteger: return "whole numbers";
    case Kind::kPositive: return "whole numbers of at least 0";
    default: return "numbers";
  }
}

bool IsNumber(std::string_view value) {
  // The server also accepts NaN and infinities.
  return !value.empty() && (value[0] == '-' || value[0] == 'N' || value[0] == 'I' || (value[0] >= '0' && value[0] <= '9'));
}

bool IsOf(Kind kind, std::string_view value) {
  const bool is_whole = IsNumber(value) && value.find_first_not_of("-0123456789") == std::string_view::npos;
  switch (kind) {
    case Kind::kText: return value[0] == '"';
    case Kind::kBool: return value == "true" || value == "false";
    case Kind::kInteger: return is_whole;
    case Kind::kPositive: return is_whole && value[0] != '-';
    case Kind::kNumber: return IsNumber(value);
    default: return false;
  }
}

// Shows a value in a form that its caller recognizes.
std::string Shown(std::string_view value) {
  if (value[0] == '{') return "an object";
  if (value[0] == '[') return "a list";
  const std::string begin = Printable(value.substr(0, kMostShown)) + (value.size() > kMostShown ? "..." : "");
  if (value[0] == '"') return "the string " + begin;
  return IsNumber(value) ? "the number " + begin : begin;
}

std::string Shape(const std::vector<int64_t>& dims) {
  std::string text;
  for (const int64_t dim : dims) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return "[" + text + "]";
}

// Describes what an input takes for one sample.
std::string What(const GenerateInput& input) {
  if (input.json() == GenerateInput::Json::kObject) return "a string, the text of a JSON object";
  if (input.json() == GenerateInput::Json::kList) return "a string, the text of a JSON list of objects";
  const Kind kind = KindOf(input.type);
  const auto own = input.dims.begin() + (input.is_batched ? 1 : 0);
  const bool is_one = std::all_of(own, input.dims.end(), [](int64_t dim) { return dim == 1; });
  return is_one || kind == Kind::kNone ? One(kind) : std::string("a list of ") + Many(kind);
}

std::string Taken(const GenerateInput& input) {
  return Name(input.name) + " (" + What(input) + (input.is_optional ? ", optional)" : ")");
}

std::string AllTaken(const std::vector<GenerateInput>& inputs) {
  std::string text;
  const size_t shown = std::min(inputs.size(), kMostNames);
  for (size_t i = 0; i < shown; ++i) {
    text += (i == 0 ? "" : i + 1 == inputs.size() ? " and " : ", ") + Taken(inputs[i]);
  }
  return text + (shown < inputs.size() ? " and " + std::to_string(inputs.size() - shown) + " more" : "");
}

// The edit distance of two names, in which two exchanged letters count as one edit.
size_t Distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before_last(b.size() + 1);
  std::vector<size_t> last(b.size() + 1);
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool is_exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (is_exchanged) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    before_last.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

// Returns the input whose name is nearest to a misspelt one, or null if none is near.
const GenerateInput* Nearest(std::string_view name, const std::vector<const GenerateInput*>& candidates) {
  const GenerateInput* nearest = nullptr;
  size_t least = 1 + name.size() / 4 + 1;
  for (const GenerateInput* candidate : candidates) {
    if (name.size() > kMostLetters || candidate->name.size() > kMostLetters) continue;
    const size_t distance = Distance(name, candidate->name);
    if (distance < least && distance < candidate->name.size()) {
      least = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

// Describes an error in the number of values.
std::string FindSizeError(const GenerateInput& input, uint64_t count) {
  const bool is_open = std::find(input.dims.begin(), input.dims.end(), -1) != input.dims.end();
  uint64_t each = 1;
  for (const int64_t dim : input.dims) {
    if (dim == 0 || (dim > 0 && __builtin_mul_overflow(each, static_cast<uint64_t>(dim), &each))) return "";
  }
  if (is_open ? count % each == 0 : count == each) return "";
  return "the input " + Name(input.name) + " has " + Count(count, "value", "values") + ", and its shape is " +
         Shape(input.dims) + ": expected " + (is_open ? "a multiple of " + std::to_string(each) : std::to_string(each)) +
         ", in one flat list";
}

std::string FindValueError(const GenerateRequest& request, const GenerateInput& input, std::string_view value) {
  const Kind kind = KindOf(input.type);
  const std::string name = "the input " + Name(input.name);
  if (kind == Kind::kNone) {
    return name + " is of " + input.type.substr(std::min<size_t>(input.type.size(), 5)) +
           ", which JSON cannot hold: send it to /infer in binary, or over gRPC";
  }
  if (value[0] != '[') {
    if (!IsOf(kind, value)) return name + " takes " + What(input) + ", got " + Shown(value);
    return FindSizeError(input, 1);
  }
  uint64_t count = 0;
  std::string wrong;
  const bool is_whole = JsonReader(value).Array([&](std::string_view element) {
    if (wrong.empty() && !IsOf(kind, element)) {
      wrong = element[0] == '['
                  ? name + " is a list of lists, and " + request.endpoint + " takes one flat list of " + Many(kind) +
                        ", which it divides by the shape " + Shape(input.dims) + "; /infer takes tensors of any shape"
                  : name + " takes " + Many(kind) + ", got " + Shown(element) + " at index " + std::to_string(count);
    }
    ++count;
  });
  if (!wrong.empty() || !is_whole) return wrong;
  return FindSizeError(input, count);
}

struct Found {
  std::vector<bool> has;
  std::vector<std::string> unknown;  // names that stand in the request itself
  std::string wrong;
};

void LookAt(const GenerateRequest& request, const std::vector<GenerateInput>& inputs, const std::string& name,
            std::string_view value, bool is_nested, Found* found) {
  const auto input = std::find_if(inputs.begin(), inputs.end(), [&](const auto& one) { return one.name == name; });
  if (input != inputs.end()) {
    found->has[static_cast<size_t>(input - inputs.begin())] = true;
    if (found->wrong.empty()) found->wrong = FindValueError(request, *input, value);
    return;
  }
  if (!is_nested && name == "parameters") {
    JsonReader(value).Object([&](const std::string& inner, std::string_view inner_value) {
      LookAt(request, inputs, inner, inner_value, true, found);
    });
  } else if (!is_nested && name != "id" && found->unknown.size() < kMostNames) {
    found->unknown.push_back(name);
  }
}

// Describes names that are no inputs, or inputs that are missing; "" if there are none.
std::string FindNameError(const GenerateRequest& request, const std::vector<GenerateInput>& inputs, const Found& found,
                          bool has_parameters) {
  const GenerateInput* missing = nullptr;
  std::vector<const GenerateInput*> left;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (found.has[i]) continue;
    left.push_back(&inputs[i]);
    if (missing == nullptr && !inputs[i].is_optional && !request.body.is_cut()) missing = &inputs[i];
  }
  if (missing == nullptr && (has_parameters || found.unknown.empty())) return "";
  std::string text;
  const GenerateInput* meant = nullptr;
  for (const std::string& name : found.unknown) {
    meant = Nearest(name, left);
    if (meant == nullptr) continue;
    text = Name(name) + " is no input of the model " + Name(request.model) + ": did you mean " + Name(meant->name) + "?";
    break;
  }
  if (meant == nullptr && missing != nullptr) {
    text = "the input " + Name(missing->name) + " is missing";
    for (const std::string& name : found.unknown) text += (&name == found.unknown.data() ? "; got " : ", ") + Name(name);
    text += ".";
  }
  if (meant == nullptr && missing == nullptr) {
    text = Name(found.unknown[0]) + " is no input of the model " + Name(request.model) + ".";
  }
  text += inputs.empty() ? " The model takes no inputs" : " The model takes " + AllTaken(inputs);
  if (missing == nullptr) text += ". What is meant for others goes into \"parameters\": {...}";
  return text;
}

// Whether a body that is no object is the content of a file, or a form with one, as `curl --data-binary` and `curl -F`
// send them. Other bodies that are no JSON may have a slip, whose place Triton reports.
bool IsFileOrForm(std::string_view body) {
  const bool is_text = std::all_of(body.begin(), body.end(), [](unsigned char byte) {
    return byte >= 0x20 || (byte >= '\t' && byte <= '\r');
  });
  return !body.empty() && body[0] != '{' && (!is_text || body.rfind("--", 0) == 0);
}

std::string FileError(const GenerateRequest& request, const std::vector<GenerateInput>& inputs) {
  const std::string taken = inputs.empty() ? "" : ". The model takes " + AllTaken(inputs);
  const bool takes_bytes = inputs.size() == 1 && (inputs[0].type == "TYPE_STRING" || inputs[0].type == "TYPE_UINT8");
  const std::string version = request.version < 0 ? "" : "/versions/" + std::to_string(request.version);
  return "expected a JSON object with the inputs, got the bytes of a file, or a form" + taken +
         (takes_bytes ? ". Its infer takes the bytes of a file: curl --data-binary @FILE -H "
                        "'Inference-Header-Content-Length: 0' .../v2/models/" +
                            request.model + version + "/infer"
                      : ". In JSON, bytes are base64 where the model reads that; clients send them as they are");
}

}  // namespace

ModelInterface ReadInterface(std::string_view config) {
  ModelInterface model;
  bool is_batched = false;
  std::map<std::string, std::string> input_hints;
  std::map<std::string, std::string> output_hints;
  const auto text = [](std::string_view value) {
    std::string read;
    JsonReader(value).String(&read);
    return read;
  };
  const auto number = [](std::string_view value) { return std::strtoll(std::string(value).c_str(), nullptr, 10); };
  const auto read_tensors = [&](std::string_view list, std::vector<GenerateInput>* tensors) {
    JsonReader(list).Array([&](std::string_view value) {
      GenerateInput tensor;
      JsonReader(value).Object([&](const std::string& name, std::string_view member) {
        if (name == "name") tensor.name = text(member);
        if (name == "data_type") tensor.type = text(member);
        if (name == "optional") tensor.is_optional = member == "true";
        if (name == "dims") JsonReader(member).Array([&](std::string_view dim) { tensor.dims.push_back(number(dim)); });
      });
      tensors->push_back(std::move(tensor));
    });
  };
  JsonReader(config).Object([&](const std::string& name, std::string_view member) {
    if (name == "max_batch_size") is_batched = number(member) > 0;
    if (name == "input") read_tensors(member, &model.inputs);
    if (name == "output") read_tensors(member, &model.outputs);
    if (name == "parameters") {
      // Our servers have this parameter: HINTS_PARAMETER of pytriton.model_config.
      const std::string hints = text(JsonMember(JsonMember(member, "pytriton_hints"), "string_value"));
      JsonReader(hints).Object([&](const std::string& kind, std::string_view named) {
        auto* const read = kind == "inputs" ? &input_hints : kind == "outputs" ? &output_hints : nullptr;
        if (read == nullptr) return;
        JsonReader(named).Object([&](const std::string& tensor, std::string_view hint) { (*read)[tensor] = text(hint); });
      });
    }
    if (name != "model_transaction_policy") return;
    JsonReader(member).Object([&](const std::string& policy, std::string_view value) {
      if (policy == "decoupled") model.is_decoupled = value == "true";
    });
  });
  for (GenerateInput& tensor : model.inputs) tensor.hint = input_hints[tensor.name].substr(0, kMostOfHint);
  for (GenerateInput& tensor : model.outputs) tensor.hint = output_hints[tensor.name].substr(0, kMostOfHint);
  for (auto* tensors : {&model.inputs, &model.outputs}) {
    for (GenerateInput& tensor : *tensors) {
      tensor.is_batched = is_batched;
      if (is_batched) tensor.dims.insert(tensor.dims.begin(), -1);
    }
  }
  return model;
}

std::string FindGenerateError(const GenerateRequest& request, const std::vector<GenerateInput>& inputs,
                              bool has_parameters) {
  if (IsFileOrForm(request.body.text())) return FileError(request, inputs);
  JsonReader reader(request.body.text());
  const char begin = reader.Next();
  if (begin == '\0' || begin == '[') {
    return std::string("expected a JSON object with the inputs, got ") + (begin == '[' ? "a list" : "no body") +
           (inputs.empty() ? "" : ". The model takes " + AllTaken(inputs));
  }
  Found found;
  found.has.resize(inputs.size());
  const bool is_whole = reader.Object([&](const std::string& name, std::string_view value) {
    LookAt(request, inputs, name, value, false, &found);
  });
  // Triton reports errors of the JSON itself.
  if (!is_whole && !request.body.is_cut()) return "";
  return found.wrong.empty() ? FindNameError(request, inputs, found, has_parameters) : found.wrong;
}

OwnNames::OwnNames(const RequestText& body) {
  JsonReader(body.text()).Object([&](const std::string& name, std::string_view) {
    // The members of these two are not parameters of their own.
    if (name != "id" && name != "parameters") hashes_.push_back(std::hash<std::string_view>()(name));
  });
  std::sort(hashes_.begin(), hashes_.end());
}

bool OwnNames::Has(std::string_view name) const {
  return std::binary_search(hashes_.begin(), hashes_.end(), std::hash<std::string_view>()(name));
}

}  // namespace pytriton::guard
