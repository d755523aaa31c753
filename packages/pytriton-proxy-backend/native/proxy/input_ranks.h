// How many dimensions each input of a model has, as its configuration says.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pytriton {

class InputRanks {
 public:
  // Reads a model's configuration, the JSON of `TRITONBACKEND_ModelConfig`. What is not found there is not known.
  void Read(std::string_view configuration);
  // The dimensions of an input, its batch axis among them where the model batches; 0 where they are not known.
  uint32_t Find(std::string_view name) const {
    for (const auto& rank : ranks_) {
      if (rank.first == name) return rank.second;
    }
    return 0;
  }

 private:
  std::vector<std::pair<std::string, uint32_t>> ranks_;
};

}  // namespace pytriton
