// Numbers by chance, the same ones for the same seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

class Chance {
 public:
  explicit Chance(uint32_t seed) : engine_(seed) {}
  size_t Below(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(engine_); }

 private:
  std::mt19937 engine_;
};
