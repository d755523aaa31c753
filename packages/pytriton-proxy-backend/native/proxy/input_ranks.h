// How many dimensions each input of a model has, and which of them are free, as its configuration says.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pytriton {

struct InputForm {
  std::string name;
  uint32_t rank;  // its dimensions, the batch axis among them where the model batches
  std::vector<uint32_t> free;  // those of them that differ between requests, without the batch axis
};

class InputRanks {
 public:
  // Reads a model's configuration, the JSON of `TRITONBACKEND_ModelConfig`. What is not found there is not known.
  void Read(std::string_view configuration);
  // The dimensions of an input, its batch axis among them where the model batches; 0 where they are not known.
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
