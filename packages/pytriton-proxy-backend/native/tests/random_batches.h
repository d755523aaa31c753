// Batches of a double of Triton's requests: made, written as a connection does it, and read as a worker does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../proxy/batch/batch.h"
#include "check.h"
#include "triton_requests.h"

namespace pytriton {

using Random = std::mt19937_64;
using Requests = std::vector<std::unique_ptr<TRITONBACKEND_Request>>;

constexpr uint32_t kBytes = TRITONSERVER_TYPE_BYTES;
inline std::atomic<uint64_t> in_flight{0};

inline uint64_t Draw(Random& random, uint64_t below) { return random() % below; }

inline std::string StringOf(const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + text;
}

// Of each data type, in one buffer or in several.
inline TRITONBACKEND_Input MakeInput(Random& random, uint32_t dtype, int64_t rows) {
  TRITONBACKEND_Input input{"x" + std::to_string(dtype), dtype, {rows, static_cast<int64_t>(Draw(random, 3))}, 0, {}};
  const auto count = static_cast<uint64_t>(rows * input.dims[1]);
  std::string payload;
  for (uint64_t i = 0; i < count; ++i) {
    const char letter = static_cast<char>('a' + Draw(random, 26));
    payload += dtype == kBytes ? StringOf(std::string(Draw(random, 9), letter)) : std::string(FixedElementSize(dtype), letter);
  }
  input.byte_size = payload.size();
  const size_t middle = Draw(random, payload.size() + 1);
  if (Draw(random, 3) == 0) {
    input.buffers = {payload.substr(0, middle), payload.substr(middle)};
  } else if (!payload.empty()) {
    input.buffers = {payload};
  }
  return input;
}

inline std::string Joined(const TRITONBACKEND_Input& input) {
  std::string all;
  for (const auto& buffer : input.buffers) all += buffer;
  return all;
}

// What a worker would read.
inline void CheckRecord(const std::vector<uint8_t>& record, const std::vector<TRITONBACKEND_Request*>& expected) {
  RecordHeader header;
  std::memcpy(&header, record.data(), sizeof(header));
  CHECK(header.entry_count == expected.size());
  const auto* entries = reinterpret_cast<const RequestEntry*>(record.data() + header.entries_offset);
  const auto* tensors = reinterpret_cast<const TensorEntry*>(record.data() + header.tensors_offset);
  std::vector<size_t> found(expected.size());
  for (size_t r = 0; r < expected.size(); ++r) {
    CHECK(entries[r].rows == static_cast<uint32_t>(expected[r]->inputs[0].dims[0]));
    const auto* id = reinterpret_cast<const char*>(record.data()) + entries[r].id.offset;
    CHECK(std::string(id, entries[r].id.length) == expected[r]->id);
  }
  for (uint32_t t = 0; t < header.tensor_count; ++t) {
    const TensorEntry& tensor = tensors[t];
    const std::string name(reinterpret_cast<const char*>(record.data()) + tensor.name.offset, tensor.name.length);
    const char* at = reinterpret_cast<const char*>(record.data()) + tensor.payload_offset;
    const char* end = at + tensor.payload_length;
    for (size_t r = 0; r < expected.size(); ++r) {
      if (tensor.owner != kWholeBatch && tensor.owner != r) continue;
      for (const auto& input : expected[r]->inputs) {
        if (input.name != name) continue;
        const std::string payload = Joined(input);
        CHECK(static_cast<uint64_t>(end - at) >= payload.size());
        CHECK(payload.empty() || std::memcmp(at, payload.data(), payload.size()) == 0);
        at += payload.size();
        ++found[r];
      }
    }
    CHECK(at == end);
  }
  for (size_t r = 0; r < expected.size(); ++r) CHECK(found[r] == expected[r]->inputs.size());
}

// As `Connection::Send`; `change` is called when the requests were read, before they are copied.
inline std::vector<uint8_t> Write(Batch* batch, const std::function<void()>& change = [] {}) {
  BatchSource source;
  std::vector<uint8_t> record;
  BatchLayout layout;
  std::string error;
  do {
    batch->Collect(&source);
    if (batch->finished()) return {};
    CHECK(LayoutBatch(source, &layout, &error));
    record.assign(layout.record_length, 0);
    change();
    WriteBatch(source, layout, batch->id(), 0, record.data());
  } while (!batch->CompleteRecord(source, layout, record.data()));
  return record;
}

inline std::unique_ptr<Batch> MakeBatch(const Requests& requests, const InputRanks* ranks, bool decoupled) {
  std::vector<TRITONBACKEND_Request*> all;
  for (const auto& request : requests) all.push_back(request.get());
  auto batch = std::make_unique<Batch>(
      7, nullptr, all.data(), static_cast<uint32_t>(all.size()), true, decoupled, &in_flight, nullptr);
  batch->ranks = ranks;
  return batch;
}

}  // namespace pytriton
