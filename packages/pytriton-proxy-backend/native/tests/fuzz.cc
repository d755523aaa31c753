// Mutates valid response records and settings texts. `fuzz SECONDS SEED FOLDER`: FOLDER holds the golden vectors, which
// are the valid records to begin with. Whatever comes in, the parsers refuse or accept; they read nothing outside of it,
// which the sanitizers watch, and what they accept can be used.
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>

#include "../proxy/wire/record.h"
#include "../proxy/wire/settings.h"
#include "check.h"

using namespace pytriton;

namespace {

using Random = std::mt19937_64;

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

uint64_t Interesting(Random& random, uint64_t near) {
  static const uint64_t kValues[] = {0, 1, 2, 7, 8, 13, 63, 64, 65, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000,
                                     0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff};
  switch (random() % 4) {
    case 0:
      return random();
    case 1:
      return near + random() % 17 - 8;
    case 2:
      return near * 2;
    default:
      return kValues[random() % (sizeof(kValues) / sizeof(kValues[0]))];
  }
}

void Mutate(std::string* raw, Random& random) {
  for (uint64_t i = 0, count = 1 + random() % 4; i < count; ++i) {
    if (raw->empty()) return;
    const size_t width = size_t{1} << random() % 4;
    switch (random() % 8) {
      case 0:
        raw->resize(random() % raw->size());
        break;
      case 1:
        raw->append(random() % 64, static_cast<char>(random()));
        break;
      case 2:
        (*raw)[random() % raw->size()] = static_cast<char>(random());
        break;
      default: {  // a number of any width at a place where one may be
        if (raw->size() < width) break;
        const size_t at = random() % (raw->size() - width + 1) / width * width;
        uint64_t value = 0;
        std::memcpy(&value, raw->data() + at, width);
        value = Interesting(random, value);
        std::memcpy(&(*raw)[at], &value, width);
      }
    }
  }
}

// Reads everything that an accepted record offers, as the proxy would.
uint64_t Use(const ResponseRecord& record) {
  uint64_t sum = 0;
  const auto add = [&](const void* data, uint64_t length) {
    for (uint64_t i = 0; i < length; ++i) sum += static_cast<const uint8_t*>(data)[i];
  };
  std::vector<RecordParameter> parameters;
  for (const auto& entry : record.entries()) {
    if ((entry.flags & kResponseError) != 0) {
      const auto text = record.ErrorText(entry);
      add(text.data(), text.size());
    }
    record.Parameters(entry, &parameters);
    for (const auto& parameter : parameters) sum += std::strlen(parameter.key) + std::strlen(parameter.text);
  }
  std::vector<uint64_t> ends;
  for (const auto& tensor : record.tensors()) {
    sum += std::strlen(tensor.name);
    uint64_t elements = 1;
    for (uint32_t d = 0; d < tensor.dims_count; ++d) elements *= static_cast<uint64_t>(tensor.dims[d]);
    add(tensor.payload, tensor.payload_length);
    if (tensor.dtype != 13) {
      CHECK(elements * FixedElementSize(tensor.dtype) == tensor.payload_length);
    } else if (SplitStrings(tensor.payload, tensor.payload_length, {elements}, &ends)) {
      CHECK(ends.size() == 1 && ends[0] == tensor.payload_length);
    }
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 4);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<long>(std::atof(argv[1]) * 1e3));
  Random random(std::strtoull(argv[2], nullptr, 10));
  const std::string folder = argv[3];
  const std::string records[] = {Read(folder + "/record_response_columns.bin"), Read(folder + "/record_response_mixed.bin"),
                                 Read(folder + "/record_response_reference.bin")};
  const std::string text =
      "# comment\nformat = 1\nendpoint = /tmp/a.sock\nbatching = true\ndecoupled = false\nattach_timeout_ms = 10000\n"
      "arena_budget_bytes = 4294967296\narena_idle_ms = 10000\n";
  uint64_t runs = 0;
  uint64_t accepted = 0;
  uint64_t sum = 0;
  ResponseRecord record;
  std::string error;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 100; ++i, ++runs) {
      std::string raw = records[random() % 3];
      Mutate(&raw, random);
      // Memory of exactly that size, so that a byte too far is seen.
      std::unique_ptr<uint8_t[]> block(new uint8_t[raw.size()]);
      std::memcpy(block.get(), raw.data(), raw.size());
      error.clear();
      // Of the batch, too.
      Block batch;
      batch.length = random() % 1024;
      std::unique_ptr<uint8_t[]> inputs(new uint8_t[batch.length]());
      batch.data = inputs.get();
      const Block* refers = random() % 4 == 0 ? nullptr : &batch;
      if (record.Parse(block.get(), raw.size(), 7, 3, random() % 2 == 0, &error, nullptr, refers)) {
        ++accepted;
        sum += Use(record);
      } else {
        CHECK(!error.empty());
      }
    }
    std::string changed = text;
    Mutate(&changed, random);
    Settings settings;
    error.clear();
    if (ParseSettings(changed, &settings, &error)) {
      CHECK(settings.endpoint.size() <= 107 && settings.arena_budget_bytes != 0);
    } else {
      CHECK(!error.empty());
    }
  }
  std::printf("%llu records, %llu accepted, sum %llu\n", static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(accepted), static_cast<unsigned long long>(sum));
  CHECK(runs > 1000 && accepted > runs / 1000);
  return 0;
}
