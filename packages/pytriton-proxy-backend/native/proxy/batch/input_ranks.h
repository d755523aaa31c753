// How many dimensions each input of a model has according to its configuration, and which of them are free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pytriton {

struct InputForm {
  std::string name;
  uint32_t rank;  // the number of its dimensions, with the batch axis if the model batches
  std::vector<uint32_t> free;  // those that may differ between requests, without the batch axis
};

class InputRanks {
 public:
  // Reads a model's configuration, the JSON of `TRITONBACKEND_ModelConfig`. Inputs that are not in it stay unknown.
  void Read(std::string_view configuration);
  // The number of dimensions of an input, with the batch axis if the model batches; 0 if unknown.
  uint32_t Find(std::string_view name) const {
    for (const auto& form : forms_) {
      if (form.name == name) return form.rank;
    }
    return 0;
  }
  const std::vector<InputForm>& forms() const { return forms_; }

 private:
  std::vector<InputForm> forms_;
};

}  // namespace pytriton
