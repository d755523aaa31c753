// What a batch costs by itself, and then cuts requests into batches: `cost FILE`. Each line of the file is a case, `limit overhead packed inputs axes... requests`
// and `rows sizes...` of each; the answer is a line with the places of the requests of each batch, and what stands out.
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "../proxy/batch/cost.h"
#include "../proxy/link/pace.h"
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
  // What it lets expect: the line where costs differ, else the mean.
  const auto expected = [](uint64_t slope, uint64_t spread, int count, uint64_t cost) {
    CostPace pace;
    for (int i = 0; i < count; ++i) {
      const uint64_t each = 100 + 37 * static_cast<uint64_t>(i) % spread;
      pace.Took(each, 2000000 + slope * each);
    }
    return static_cast<uint64_t>(pace.ExpectedNs(cost) + 0.5);
  };
  CHECK(expected(10000, 400, 5, 300) == 0);
  CHECK(expected(10000, 400, 1000, 300) / 1000 == 5000 && expected(10000, 400, 1000, 700) / 1000 == 9000);
  CHECK(expected(0, 400, 1000, 300) == 2000000 && expected(0, 1, 1000, 300) == 2000000);
}

// When a worker is nearly done, of batches that are expected to take different times.
void TestNearlyDone() {
  constexpr double kMs = 1e6;
  Pace pace;
  for (int i = 0; i < 3; ++i) pace.Took(4000000, 2 * kMs);
  pace.Took(9000000, 0);  // nothing was expected of it
  CHECK(pace.nearly_done_ns(2 * kMs) == kNever);
  pace.Took(22000000, 10 * kMs);
  // The last four took at least twice of what was expected; a fifth of it early, and at most 1 ms.
  CHECK(pace.nearly_done_ns(10 * kMs) == 19000000 && pace.nearly_done_ns(kMs) == 1600000);
  CHECK(pace.nearly_done_ns(0.4 * kMs) == kNever && pace.nearly_done_ns(0) == kNever);
  // Nobody can tell where the times vary much.
  pace.Took(31000000, 10 * kMs);
  CHECK(pace.nearly_done_ns(10 * kMs) == kNever);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 2);
  TestPace();
  TestNearlyDone();
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
