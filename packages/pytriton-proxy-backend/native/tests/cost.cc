// Cuts requests into batches: `cost FILE`. Each line of the file is a case, `limit overhead packed inputs axes... requests`
// and `rows sizes...` of each; the answer is a line with the places of the requests of each batch, and what stands out.
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "../proxy/cost.h"
#include "check.h"

using namespace pytriton;

int main(int count, char** arguments) {
  CHECK(count == 2);
  std::ifstream file(arguments[1]);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    const auto next = [&words] {
      uint64_t number = 0;
      CHECK(words >> number);
      return number;
    };
    Settings settings;
    settings.cost_limit = next();
    settings.cost_overhead = next();
    settings.cost_packed = next() != 0;
    std::vector<uint32_t> axes(next());
    size_t dimensions = 0;
    for (auto& axis : axes) dimensions += axis = static_cast<uint32_t>(next());
    CostCut cut(settings, axes);
    const uint64_t requests = next();
    for (uint64_t i = 0; i < requests; ++i) {
      const auto rows = static_cast<uint32_t>(next());
      std::vector<uint64_t> sizes(dimensions);
      for (auto& size : sizes) size = next();
      cut.Add(rows, sizes);
    }
    for (const auto& batch : cut.Cut()) {
      for (const uint32_t place : batch) std::cout << place << ' ';
      std::cout << "; ";
    }
    std::cout << '\n';
  }
}
