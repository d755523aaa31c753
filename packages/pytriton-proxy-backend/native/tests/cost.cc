// What a batch costs by itself, and then cuts requests into batches: `cost FILE`. Each line of the file is a case, `limit overhead packed inputs axes... requests`
// and `rows sizes...` of each; the answer is a line with the places of the requests of each batch, and what stands out.
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "../proxy/batch/cost.h"
#include "check.h"

using namespace pytriton;

namespace {

void TestPace() {
  constexpr uint64_t kLimit = 1000;
  const auto measured = [](uint64_t fixed, uint64_t slope, uint64_t spread, int count) {
    CostPace pace;
    for (int i = 0; i < count; ++i) {
      const uint64_t cost = 100 + 37 * static_cast<uint64_t>(i) % spread;
      pace.Took(cost, fixed + slope * cost);
    }
    return pace.overhead(kLimit);
  };
  const uint64_t guess = CostPace().overhead(kLimit);
  CHECK(guess > 0 && guess < kLimit);
  // 2 ms for each batch, 10 us for each token.
  const uint64_t found = measured(2000000, 10000, 400, 1000);
  CHECK(found >= 199 && found <= 201);
  // Too few, or too much alike, to tell.
  CHECK(measured(2000000, 10000, 400, 5) == guess && measured(2000000, 10000, 2, 1000) == guess);
  // Time that does not follow the cost, and time that follows nothing else.
  CHECK(measured(5000000, 0, 400, 100) == kLimit && measured(5000000, 1, 400, 100) == kLimit);
  CHECK(measured(0, 10000, 400, 100) == 1);
  // A slow batch at times, and another pace after a while.
  CostPace pace;
  for (uint64_t i = 0; i < 2000; ++i) {
    const uint64_t cost = 50 + 97 * i % 900;
    pace.Took(cost, (i < 1000 ? 100000 : 1000000) + 10000 * cost + (i % 100 == 0 ? 5000000 : 0));
  }
  CHECK(pace.overhead(kLimit) > 60 && pace.overhead(kLimit) < 200);
  CHECK(CostPace().overhead(1) == 1);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 2);
  TestPace();
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
    const uint64_t overhead = next();
    settings.cost_packed = next() != 0;
    std::vector<uint32_t> axes(next());
    size_t dimensions = 0;
    for (auto& axis : axes) dimensions += axis = static_cast<uint32_t>(next());
    CostCut cut(settings, axes, overhead);
    const uint64_t requests = next();
    for (uint64_t i = 0; i < requests; ++i) {
      const auto rows = static_cast<uint32_t>(next());
      std::vector<uint64_t> sizes(dimensions);
      for (auto& size : sizes) size = next();
      cut.Add(rows, sizes);
    }
    for (const auto& batch : cut.Cut()) {
      for (const uint32_t place : batch.places) std::cout << place << ' ';
      std::cout << "; ";
    }
    std::cout << '\n';
  }
}
