#include "input_ranks.h"

#include <cstdlib>
#include <utility>

#include "../text/json_reader.h"

namespace pytriton {

namespace {

// Reads the form of an input, without a batch axis, from its part of the configuration.
InputForm FormOf(std::string_view input) {
  InputForm form{};
  JsonReader(JsonMember(input, "name")).String(&form.name);
  // With `reshape`, the backend gets another shape than callers send.
  const std::string_view reshaped = JsonMember(JsonMember(input, "reshape"), "shape");
  JsonReader(reshaped.empty() ? JsonMember(input, "dims") : reshaped).Array([&form](std::string_view dim) {
    // Protobuf may write numbers of 64 bits as strings in JSON.
    if (dim.substr(0, 1) == "-" || dim.substr(0, 2) == "\"-") form.free.push_back(form.rank);
    ++form.rank;
  });
  return form;
}

}  // namespace

void InputRanks::Read(std::string_view configuration) {
  forms_.clear();
  JsonReader(JsonMember(configuration, "input")).Array([this](std::string_view input) {
    forms_.push_back(FormOf(input));
  });
  const std::string max_batch_size(JsonMember(configuration, "max_batch_size"));
  if (std::strtoll(max_batch_size.c_str(), nullptr, 10) <= 0) return;
  for (auto& form : forms_) {
    ++form.rank;
    for (auto& axis : form.free) ++axis;
  }
}

}  // namespace pytriton
