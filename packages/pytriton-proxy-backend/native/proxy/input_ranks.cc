#include "input_ranks.h"

#include <cstdlib>

#include "json_reader.h"

namespace pytriton {

namespace {

uint32_t CountElements(std::string_view array) {
  uint32_t count = 0;
  JsonReader(array).Array([&](std::string_view) { ++count; });
  return count;
}

// The name of an input and its dimensions, of its part of the configuration.
std::pair<std::string, uint32_t> RankOf(std::string_view input) {
  std::string name;
  JsonReader(JsonMember(input, "name")).String(&name);
  // What the backend gets, in place of what callers send.
  const std::string_view reshaped = JsonMember(JsonMember(input, "reshape"), "shape");
  return {name, CountElements(reshaped.empty() ? JsonMember(input, "dims") : reshaped)};
}

}  // namespace

void InputRanks::Read(std::string_view configuration) {
  ranks_.clear();
  JsonReader(JsonMember(configuration, "input")).Array([this](std::string_view input) {
    ranks_.push_back(RankOf(input));
  });
  const std::string max_batch_size(JsonMember(configuration, "max_batch_size"));
  if (std::strtoll(max_batch_size.c_str(), nullptr, 10) <= 0) return;
  for (auto& rank : ranks_) ++rank.second;
}

}  // namespace pytriton
