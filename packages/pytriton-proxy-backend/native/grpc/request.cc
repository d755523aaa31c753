// Parses messages of inference.ModelInferRequest.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "../proxy/text/utf8.h"
#include "inference.h"
#include "protobuf.h"

namespace pytriton::grpc {

namespace {

// A message could announce very many things with two bytes each, which would take far more memory than the message.
constexpr size_t kMostTensors = 16 * 1024;
constexpr size_t kMostParameters = 1024;
constexpr size_t kMostDimensions = 1024;

constexpr uint32_t kBytesContents = 8;
constexpr size_t kStringPrefix = sizeof(uint32_t);

// The field of InferTensorContents for a data type, and the size of an element in a tensor. Texts are handled
// separately.
struct Form {
  std::string_view datatype;
  uint32_t field;
  uint32_t size;
};
constexpr Form kForms[] = {
    {"BOOL", 1, 1},   {"INT8", 2, 1},  {"INT16", 2, 2},  {"INT32", 2, 4},
    {"INT64", 3, 8},  {"UINT8", 4, 1}, {"UINT16", 4, 2}, {"UINT32", 4, 4},
    {"UINT64", 5, 8}, {"FP32", 6, 4},  {"FP64", 7, 8},   {"BYTES", kBytesContents, 0},
};

const Form* FindForm(std::string_view datatype) {
  const auto found = std::find_if(std::begin(kForms), std::end(kForms),
                                  [datatype](const Form& form) { return form.datatype == datatype; });
  return found == std::end(kForms) ? nullptr : found;
}

// Walks through the elements of an InferTensorContents: calls `number` with the field and the bits of each number,
// `text` with the bytes of each text. Returns false if it is malformed.
template <typename Number, typename Text>
bool VisitElements(std::string_view contents, Number number, Text text) {
  FieldReader field(contents);
  while (field.Next()) {
    const uint32_t of = field.number();
    if (field.Is(kBytesContents, kBytes)) {
      text(field.bytes());
    } else if (of < 6) {
      if (field.Is(of, kVarint)) number(of, field.value());
      if (!field.Is(of, kBytes)) continue;
      FieldReader packed(field.bytes());
      for (uint64_t value = 0; !packed.at_end();) {
        if (!packed.ReadVarint(&value)) return false;
        number(of, value);
      }
    } else if (of == 6 || of == 7) {
      if (field.Is(of, of == 6 ? kFixed32 : kFixed64)) number(of, field.value());
      if (!field.Is(of, kBytes)) continue;
      const size_t size = of == 6 ? 4 : 8;
      const std::string_view packed = field.bytes();
      if (packed.size() % size != 0) return false;
      for (size_t place = 0; place < packed.size(); place += size) {
        uint64_t value = 0;
        std::memcpy(&value, packed.data() + place, size);
        number(of, value);
      }
    }
  }
  return field.ok();
}

bool ReadText(const FieldReader& field, std::string* text) {
  if (!IsUtf8(field.bytes())) return false;
  text->assign(field.bytes());
  return true;
}

// Reads the value of a parameter. If several are set the last one counts, as in protobuf.
bool ReadValue(std::string_view message, Parameter* parameter, bool* is_set) {
  FieldReader field(message);
  while (field.Next()) {
    using Type = Parameter::Type;
    if (field.Is(1, kVarint)) {
      parameter->type = Type::kBool;
      parameter->truth = field.value() != 0;
    } else if (field.Is(2, kVarint)) {
      parameter->type = Type::kInt;
      parameter->integer = static_cast<int64_t>(field.value());
    } else if (field.Is(3, kBytes)) {
      parameter->type = Type::kString;
      if (!ReadText(field, &parameter->text)) return false;
    } else if (field.Is(4, kFixed64)) {
      parameter->type = Type::kDouble;
      const uint64_t bits = field.value();
      std::memcpy(&parameter->number, &bits, sizeof(bits));
    } else if (field.Is(5, kVarint)) {
      parameter->type = Type::kUnsigned;
      parameter->whole = field.value();
    } else {
      continue;
    }
    *is_set = true;
  }
  return field.ok();
}

// Reads one entry of a map of parameters.
bool ReadParameter(std::string_view message, Parameter* parameter, bool* is_set) {
  *is_set = false;
  FieldReader field(message);
  while (field.Next()) {
    if (field.Is(1, kBytes) && !ReadText(field, &parameter->name)) return false;
    if (field.Is(2, kBytes) && !ReadValue(field.bytes(), parameter, is_set)) return false;
  }
  return field.ok();
}

// Whether a parameter of a tensor can be read; nothing else is known about it here.
bool IsParameter(std::string_view message) {
  Parameter parameter;
  bool is_set = false;
  return ReadParameter(message, &parameter, &is_set);
}

bool ReadShape(const FieldReader& field, std::vector<int64_t>* shape) {
  if (field.Is(3, kVarint)) {
    shape->push_back(static_cast<int64_t>(field.value()));
    return true;
  }
  FieldReader packed(field.bytes());
  for (uint64_t size = 0; !packed.at_end();) {
    if (!packed.ReadVarint(&size)) return false;
    // One more than the limit is enough to know that there are too many.
    if (shape->size() <= kMostDimensions) shape->push_back(static_cast<int64_t>(size));
  }
  return true;
}

// Counts the elements of a shape; false if the number is too large or negative.
bool CountElements(const std::vector<int64_t>& shape, uint64_t* count) {
  *count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(*count, static_cast<uint64_t>(size), count)) return false;
  }
  return true;
}

// Checks elements that are not raw. They are used if their number and type are those of the input; Triton's own front
// end serves all other requests, because it describes the error. Returns false if they are malformed.
bool ReadElements(Input* input, bool* is_for_triton) {
  uint64_t counts[kBytesContents + 1] = {};
  uint64_t text_bytes = 0;
  const auto count_number = [&](uint32_t field, uint64_t) { ++counts[field]; };
  const auto count_text = [&](std::string_view text) {
    ++counts[kBytesContents];
    text_bytes += kStringPrefix + text.size();
  };
  if (!VisitElements(input->elements, count_number, count_text)) return false;
  uint64_t all = 0;
  for (const uint64_t count : counts) all += count;
  const Form* const form = FindForm(input->datatype);
  uint64_t expected = 0;
  if (form == nullptr || all == 0 || all != counts[form->field] || !CountElements(input->shape, &expected) || expected != all) {
    *is_for_triton = true;
    return true;
  }
  input->element_size = form->size;
  input->elements_bytes = form->field == kBytesContents ? text_bytes : all * form->size;
  return true;
}

bool AreElements(std::string_view contents) {
  return VisitElements(contents, [](uint32_t, uint64_t) {}, [](std::string_view) {});
}

bool ReadInput(std::string_view message, Input* input, bool* is_for_triton) {
  FieldReader field(message);
  while (field.Next()) {
    if (field.Is(1, kBytes)) {
      if (!ReadText(field, &input->name)) return false;
    } else if (field.Is(2, kBytes)) {
      if (!ReadText(field, &input->datatype)) return false;
    } else if (field.Is(3, kVarint) || field.Is(3, kBytes)) {
      if (!ReadShape(field, &input->shape)) return false;
    } else if (field.Is(4, kBytes)) {
      if (!IsParameter(field.bytes())) return false;
      *is_for_triton = true;  // for instance a parameter of shared memory
    } else if (field.Is(5, kBytes)) {
      if (input->has_elements) {
        // Protobuf merges several values into one, which is left to Triton.
        *is_for_triton = true;
        if (!AreElements(input->elements)) return false;
      }
      input->has_elements = true;
      input->elements = field.bytes();
    }
  }
  return field.ok() && (!input->has_elements || ReadElements(input, is_for_triton));
}

bool ReadOutput(std::string_view message, std::string* name, bool* is_for_triton) {
  FieldReader field(message);
  while (field.Next()) {
    if (field.Is(1, kBytes) && !ReadText(field, name)) return false;
    if (!field.Is(2, kBytes)) continue;
    if (!IsParameter(field.bytes())) return false;
    *is_for_triton = true;  // for instance a parameter of classification
  }
  return field.ok();
}

// Whether Triton has a rule of its own for a parameter that this one breaks or may break.
bool IsOdd(const Parameter& parameter, bool is_set) {
  using Type = Parameter::Type;
  if (!is_set) return true;
  if (parameter.name == "sequence_id") return parameter.type != Type::kInt && parameter.type != Type::kString;
  if (parameter.name == "sequence_start" || parameter.name == "sequence_end" || parameter.name == kEmptyFinal) {
    return parameter.type != Type::kBool;
  }
  if (parameter.name == "priority") {
    return parameter.type != Type::kUnsigned && (parameter.type != Type::kInt || parameter.integer < 0);
  }
  if (parameter.name == "timeout") return parameter.type != Type::kInt;
  return parameter.name.rfind("triton_", 0) == 0 || parameter.type == Type::kUnsigned;
}

bool ReadVersion(const std::string& text, int64_t* version) {
  if (text.empty()) return true;
  char* end = nullptr;
  errno = 0;
  *version = std::strtoll(text.c_str(), &end, 10);
  return errno == 0 && end == text.c_str() + text.size() && *version >= 0 && text[0] >= '0' && text[0] <= '9';
}

Status TooMany(const char* what, size_t most) {
  return {Code::kResourceExhausted, "The request has more than " + std::to_string(most) + " " + what +
                                        ", which is the most that the front end for gRPC reads."};
}

Status CheckCounts(const Request& request) {
  if (request.inputs.size() > kMostTensors) return TooMany("inputs", kMostTensors);
  if (request.outputs.size() > kMostTensors) return TooMany("requested outputs", kMostTensors);
  if (request.contents.size() > kMostTensors) return TooMany("raw contents of inputs", kMostTensors);
  if (request.parameters.size() > kMostParameters) return TooMany("parameters", kMostParameters);
  if (!request.inputs.empty() && request.inputs.back().shape.size() > kMostDimensions) {
    return TooMany("dimensions of an input", kMostDimensions);
  }
  return {};
}

void SetParameter(Parameter parameter, std::vector<Parameter>* parameters) {
  const auto before = std::find_if(parameters->begin(), parameters->end(),
                                   [&](const Parameter& other) { return other.name == parameter.name; });
  if (before == parameters->end()) {
    parameters->push_back(std::move(parameter));
  } else {
    *before = std::move(parameter);
  }
}

}  // namespace

std::string_view ModelOf(const char* message, size_t size) {
  std::string_view model;
  FieldReader field({message, size});
  while (field.Next()) {
    if (field.Is(1, kBytes)) model = field.bytes();
  }
  return model;
}

Status Read(const char* message, size_t size, Request* request) {
  // This is gRPC's own text, with the name of the message.
  const Status malformed = {Code::kInternal, "Unable to parse request: the message is no inference.ModelInferRequest.",
                            guard::Outcome::kInvalid};
  FieldReader field({message, size});
  while (field.Next()) {
    if (field.Is(1, kBytes)) {
      if (!ReadText(field, &request->model)) return malformed;
    } else if (field.Is(2, kBytes)) {
      if (!ReadText(field, &request->version)) return malformed;
    } else if (field.Is(3, kBytes)) {
      if (!ReadText(field, &request->id)) return malformed;
    } else if (field.Is(4, kBytes)) {
      Parameter parameter;
      bool is_set = false;
      if (!ReadParameter(field.bytes(), &parameter, &is_set)) return malformed;
      request->is_for_triton = request->is_for_triton || IsOdd(parameter, is_set);
      request->is_in_sequence = request->is_in_sequence || parameter.name == "sequence_id";
      SetParameter(std::move(parameter), &request->parameters);
    } else if (field.Is(5, kBytes)) {
      request->inputs.emplace_back();
      if (!ReadInput(field.bytes(), &request->inputs.back(), &request->is_for_triton)) return malformed;
    } else if (field.Is(6, kBytes)) {
      request->outputs.emplace_back();
      if (!ReadOutput(field.bytes(), &request->outputs.back(), &request->is_for_triton)) return malformed;
    } else if (field.Is(7, kBytes)) {
      request->contents.push_back(field.bytes());
    }
    const Status counts = CheckCounts(*request);
    if (counts.code != Code::kOk) return counts;
  }
  if (!field.ok()) return malformed;
  // Either all inputs are raw or none.
  const auto count = static_cast<size_t>(std::count_if(request->inputs.begin(), request->inputs.end(),
                                                       [](const Input& input) { return input.has_elements; }));
  const bool are_raw = count == 0 && request->contents.size() == request->inputs.size();
  const bool are_elements = count == request->inputs.size() && request->contents.empty();
  if ((!are_raw && !are_elements) || !ReadVersion(request->version, &request->version_number)) {
    request->is_for_triton = true;
  }
  return {};
}

void CopyElements(const Input& input, char* to) {
  const auto copy_number = [&](uint32_t field, uint64_t value) {
    if (field == 1) value = value != 0;
    // The lowest bytes of a number come first.
    std::memcpy(to, &value, input.element_size);
    to += input.element_size;
  };
  const auto copy_text = [&](std::string_view text) {
    const auto size = static_cast<uint32_t>(text.size());
    std::memcpy(to, &size, kStringPrefix);
    std::memcpy(to + kStringPrefix, text.data(), text.size());
    to += kStringPrefix + text.size();
  };
  VisitElements(input.elements, copy_number, copy_text);
}

}  // namespace pytriton::grpc
