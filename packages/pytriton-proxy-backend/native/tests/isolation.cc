// Batches against a double of Triton, which checks nothing: `isolation SEED ROUNDS`. Random requests, some of which are not
// what they say: each of these has its own error, each other one is in the record with its own bytes and no others, and
// all are released once. Callers change shared memory while it is read, workers change theirs while outputs are copied.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../proxy/batch/batch.h"
#include "../proxy/triton/triton_util.h"
#include "check.h"
#include "random_batches.h"

using namespace pytriton;

namespace {

// ---- requests --------------------------------------------------------------------------------------------------------

// Something that Triton of some version may let through. Whether it is wrong then.
bool Spoil(Random& random, TRITONBACKEND_Request* request) {
  TRITONBACKEND_Input& input = request->inputs[Draw(random, request->inputs.size())];
  std::string payload = Joined(input);
  switch (Draw(random, 9)) {
    case 0:
      input.on_gpu = true;
      return !input.buffers.empty();
    case 1:
      input.dtype = static_cast<uint32_t>(Draw(random, 2) == 0 ? 0 : 99);
      return true;
    case 2:
      ++input.byte_size;
      return true;
    case 3:
      request->has_odd_parameter = true;
      return true;
    case 4:
      input.dims.push_back(1);
      return true;
    case 5:
      input.dims[1] = Draw(random, 2) == 0 ? -1 : int64_t{1} << 61;
      return true;
    case 6:
      input.dims[1] += 1;
      break;
    case 7:
      payload += std::string(1 + Draw(random, 8), '\0');
      break;
    default:
      if (payload.empty()) return false;
      if (input.dtype == kBytes && Draw(random, 2) == 0) {
        payload[Draw(random, payload.size())] ^= static_cast<char>(1 << Draw(random, 8));
      } else {
        payload.resize(payload.size() - 1);
      }
  }
  input.buffers = {payload};
  input.byte_size = payload.size();
  const auto count = static_cast<uint64_t>(input.dims[0] * input.dims[1]);
  if (input.dtype != kBytes) return payload.size() != count * FixedElementSize(input.dtype);
  return !WrongStrings(reinterpret_cast<const uint8_t*>(payload.data()), payload.size(), count).empty();
}

Requests MakeRequests(Random& random) {
  Requests requests;
  const uint64_t count = 1 + Draw(random, 8);
  const auto first = static_cast<uint32_t>(1 + Draw(random, 14));
  for (uint64_t i = 0; i < count; ++i) {
    auto request = std::make_unique<TRITONBACKEND_Request>();
    request->id = std::string(Draw(random, 3), '-') + std::to_string(i);
    const auto rows = static_cast<int64_t>(1 + Draw(random, 3));
    request->inputs.push_back(MakeInput(random, Draw(random, 4) == 0 ? 1 + static_cast<uint32_t>(Draw(random, 14)) : first, rows));
    if (Draw(random, 2) == 0 && request->inputs[0].dtype != kBytes) {
      request->inputs.push_back(MakeInput(random, kBytes, rows));
      if (Draw(random, 2) == 0) std::swap(request->inputs[0], request->inputs[1]);
    }
    if (Draw(random, 3) == 0) request->is_good = !Spoil(random, request.get());
    requests.push_back(std::move(request));
  }
  return requests;
}

void Round(Random& random, const InputRanks& ranks) {
  const Requests requests = MakeRequests(random);
  std::vector<TRITONBACKEND_Request*> good;
  for (const auto& request : requests) {
    if (request->is_good) good.push_back(request.get());
  }
  {
    auto batch = MakeBatch(requests, &ranks, Draw(random, 2) == 0);
    std::vector<std::unique_ptr<Batch>> parts;
    if (Draw(random, 4) == 0) {
      if (auto half = batch->SplitOff(8)) parts.push_back(std::move(half));
    }
    parts.push_back(std::move(batch));
    CHECK(in_flight == parts.size());
    size_t at = 0;
    for (auto& part : parts) {
      const std::vector<uint8_t> record = Write(part.get());
      const size_t size = part->finished() ? 0 : part->size();
      CHECK(at + size <= good.size());
      if (size != 0) CheckRecord(record, {good.begin() + at, good.begin() + at + size});
      at += size;
    }
    CHECK(at == good.size());
    for (const auto& request : requests) {
      // The others have no answer yet.
      CHECK(request->answers == (request->is_good ? 0 : 1) && request->released == request->answers);
      if (request->is_good) continue;
      CHECK(request->code == TRITONSERVER_ERROR_INVALID_ARG);
      CHECK(request->error.find("input '") == 0 || request->error.find("parameter 'odd'") == 0);
    }
  }
  for (const auto& request : requests) CHECK(request->answers == 1 && request->released == 1);
  CHECK(in_flight == 0 && errors == 0);
}

// ---- batches by cost -------------------------------------------------------------------------------------------------

uint64_t CostOf(const std::vector<TRITONBACKEND_Request*>& requests) {
  uint64_t rows = 0;
  std::map<std::string, uint64_t> longest;
  for (const auto* request : requests) {
    rows += static_cast<uint64_t>(request->inputs[0].dims[0]);
    for (const auto& input : request->inputs) {
      longest[input.name] = std::max(longest[input.name], static_cast<uint64_t>(std::max<int64_t>(input.dims[1], 1)));
    }
  }
  uint64_t most = 0;
  for (const auto& input : longest) most = std::max(most, rows * input.second);
  return most;
}

// Whatever requests say, each is in one batch, with its own bytes, and no batch costs more than it may.
void CostRound(Random& random, const InputRanks& ranks) {
  const Requests requests = MakeRequests(random);
  Settings settings;
  settings.cost_limit = 1 + Draw(random, 8);
  settings.cost_overhead = Draw(random, 4);
  settings.cost_alone = Draw(random, 2) == 0;
  std::map<TRITONBACKEND_Request*, int> served;
  for (const auto& request : requests) {
    request->is_costly = request->is_good && CostOf({request.get()}) > settings.cost_limit && !settings.cost_alone;
    request->is_good = request->is_good && !request->is_costly;
  }
  uint64_t ids = 8;
  {
    auto batch = MakeBatch(requests, &ranks, Draw(random, 2) == 0);
    BatchSource source;
    auto parts = batch->CutByCost(settings, settings.cost_overhead, &source, [&ids] { return ids++; });
    if (!batch->finished()) parts.push_back(std::move(batch));
    for (auto& part : parts) {
      std::vector<TRITONBACKEND_Request*> inside;
      const uint32_t size = part->size();
      const std::vector<uint8_t> record = Write(part.get());
      if (part->finished()) continue;
      for (uint32_t i = 0; i < part->size(); ++i) inside.push_back(part->request(i));
      for (auto* request : inside) ++served[request];
      CHECK(inside.size() == 1 || CostOf(inside) <= settings.cost_limit);
      CHECK(settings.cost_alone || CostOf(inside) <= settings.cost_limit);
      // Where a request was dropped, the rest takes less time than the cost of all says.
      CHECK(part->size() == size ? part->cost >= CostOf(inside) : part->cost == 0);
      // The record has the number of its batch, which `CheckRecord` does not look at.
      CheckRecord(record, inside);
    }
    for (const auto& request : requests) {
      CHECK(served[request.get()] == (request->is_good ? 1 : 0));
      CHECK(request->answers == (request->is_good ? 0 : 1) && request->released == request->answers);
      if (request->is_costly) CHECK(request->error.find("a batch of this model may cost ") == 0);
      if (!request->is_good) CHECK(request->code == TRITONSERVER_ERROR_INVALID_ARG);
    }
    for (auto& part : parts) {
      if (const auto half = part->SplitOff(ids++)) CHECK(half->cost == 0 && part->cost == 0);
    }
  }
  for (const auto& request : requests) CHECK(request->answers == 1 && request->released == 1);
  CHECK(in_flight == 0 && errors == 0);
}

// An input in which a request differs from the other one that has to be as long is the mistake of that request.
void TestInputsThatAreAlike(const InputRanks& ranks) {
  Requests requests;
  for (const int64_t other : {3, 4, 3}) {
    requests.push_back(std::make_unique<TRITONBACKEND_Request>());
    requests.back()->id = "r";
    for (const auto& [name, size] : {std::pair<const char*, int64_t>{"x2", 3}, {"x6", other}}) {
      const auto dtype = static_cast<uint32_t>(name[1] - '0');
      requests.back()->inputs.push_back(
          {name, dtype, {1, size}, static_cast<uint64_t>(size), {std::string(static_cast<size_t>(size), 'a')}});
    }
  }
  Settings settings;
  settings.cost_limit = 100;
  settings.cost_alike = 1u << 1 | 1u << 5;
  {
    auto batch = MakeBatch(requests, &ranks, false);
    BatchSource source;
    CHECK(batch->CutByCost(settings, 1, &source, [] { return uint64_t{9}; }).empty());
    CHECK(batch->size() == 2 && batch->request(0) == requests[0].get() && batch->request(1) == requests[2].get());
    CHECK(requests[1]->error.find("input 'x6' has the size 4 where input 'x2' has 3: ") == 0);
    CHECK(requests[0]->answers == 0 && requests[2]->answers == 0);
  }
}

// ---- memory that others write to -------------------------------------------------------------------------------------

TRITONBACKEND_Input Text(const std::string& payload) {
  return {"text", kBytes, {1, 1}, payload.size(), {payload}};
}

// A caller turns a good text into one that reaches for its neighbour's, when it was looked at.
void TestCallersChangeSharedMemory() {
  Requests requests;
  for (const char* text : {"one", "two", "three"}) {
    requests.push_back(std::make_unique<TRITONBACKEND_Request>());
    requests.back()->id = text;
    requests.back()->inputs.push_back(Text(StringOf(text)));
  }
  auto batch = MakeBatch(requests, nullptr, false);
  int changes = 0;
  const std::vector<uint8_t> record = Write(batch.get(), [&] {
    // In the second turn, when the first caller was found out, the second one does it.
    const size_t which = static_cast<size_t>(changes++);
    if (which < 2) requests[which]->inputs[0].buffers[0][0] = 3 + 4 + 3;
  });
  CHECK(changes == 3 && batch->size() == 1);
  CheckRecord(record, {requests[2].get()});
  CHECK(requests[0]->error == "input 'text': string 0 of 1: expected 10 bytes, as its length says, got 3");
  CHECK(requests[1]->error == requests[0]->error && requests[2]->error.empty());
}

// Beside a 0 any other dimension could be said for nothing, and no array can have them.
void TestEmptyTensors() {
  for (const int64_t dim : {int64_t{1}, int64_t{1} << 20, int64_t{1} << 47, int64_t{1} << 62}) {
    for (const uint32_t dtype : {kBytes, uint32_t{2}, uint32_t{12}}) {
      Requests requests;
      for (int i = 0; i < 2; ++i) {
        requests.push_back(std::make_unique<TRITONBACKEND_Request>());
        requests.back()->inputs.push_back({"x", dtype, {1, 0, i == 0 ? dim : 1}, 0, {}});
      }
      auto batch = MakeBatch(requests, nullptr, false);
      const std::vector<uint8_t> record = Write(batch.get());
      const bool possible = dim < (dtype == 2 ? int64_t{1} << 48 : int64_t{1} << 45);
      CHECK(batch->size() == (possible ? 2 : 1) && requests[0]->error.empty() == possible);
    }
  }
}

// A worker's response to three requests: `texts` in one tensor of strings over the batch.
std::vector<uint8_t> Respond(const std::string& payload, bool whole) {
  const uint32_t count = whole ? 3 : 1;
  std::vector<uint8_t> record(1024);
  RecordHeader header{};
  header.magic = kResponseMagic;
  header.entry_count = count;
  header.tensor_count = 1;
  header.batch = 7;
  header.metadata_length = 512;
  header.record_length = 512 + payload.size();
  header.entries_offset = sizeof(header);
  header.tensors_offset = static_cast<uint32_t>(sizeof(header) + count * sizeof(ResponseEntry));
  std::memcpy(record.data(), &header, sizeof(header));
  for (uint32_t i = 0; i < count; ++i) {
    ResponseEntry entry{};
    entry.request = i;
    entry.flags = kResponseFinal;
    entry.rows = 1;
    std::memcpy(record.data() + header.entries_offset + i * sizeof(entry), &entry, sizeof(entry));
  }
  TensorEntry tensor{};
  tensor.name = {400, 1};
  tensor.dtype = kBytes;
  tensor.dims_count = 2;
  tensor.owner = whole ? kWholeBatch : 0;
  tensor.dims_offset = 408;
  tensor.payload_offset = 512;
  tensor.payload_length = payload.size();
  std::memcpy(record.data() + header.tensors_offset, &tensor, sizeof(tensor));
  record[400] = 'y';
  const int64_t dims[] = {whole ? 3 : 1, 1};
  std::memcpy(record.data() + 408, dims, sizeof(dims));
  std::memcpy(record.data() + 512, payload.data(), payload.size());
  return record;
}

// A worker writes another length when the strings were parted, or has written a wrong one from the start.
void TestWorkersChangeTheirOutputs(bool whole, bool early) {
  Requests requests;
  for (uint32_t i = 0; i < (whole ? 3u : 1u); ++i) {
    requests.push_back(std::make_unique<TRITONBACKEND_Request>());
    requests.back()->inputs.push_back(Text(StringOf("in")));
  }
  auto batch = MakeBatch(requests, nullptr, false);
  const auto own = [](int i) { return StringOf("own-" + std::to_string(i)); };
  std::vector<uint8_t> block = Respond(whole ? own(0) + own(1) + own(2) : own(0), whole);
  const auto reach = [&block, &own, whole] { block[512 + (whole ? own(0).size() : 0)] = 5 + 4 + 5; };
  ResponseRecord record;
  std::string error;
  CHECK(record.Parse(block.data(), block.size(), 7, batch->size(), false, &error));
  if (early) reach();
  while_output_is_copied = early ? std::function<void()>() : reach;
  batch->Respond(record);
  while_output_is_copied = nullptr;
  CHECK(batch->finished());
  for (size_t i = 0; i < requests.size(); ++i) {
    const bool wrong = !whole || i == 1 || early;
    CHECK(requests[i]->answers == 1 && requests[i]->error.empty() != wrong);
    if (wrong) CHECK(requests[i]->code == TRITONSERVER_ERROR_INTERNAL && requests[i]->outputs.empty());
    if (!wrong) CHECK(requests[i]->outputs == std::vector<std::string>{own(static_cast<int>(i))});
  }
}

void TestRanks() {
  InputRanks ranks;
  ranks.Read(
      R"({"name":"m","max_batch_size":8,"x":{"input":[{"name":"no","dims":[1]}]},"input":[{"name":"text",)"
      R"("data_type":"TYPE_STRING","dims":[-1]},{"name":"words","dims":["-1",2],"reshape":{"shape":[1,2,3]}},)"
      R"({"dims": [ ],"name":"scalar"}, {"name":"a\"b]","dims":[1,[2],"}"]}],"output":[{"name":"y","dims":[1]}]})");
  CHECK(ranks.Find("text") == 2 && ranks.Find("words") == 4 && ranks.Find("scalar") == 1);
  CHECK(ranks.Find("a\"b]") == 4 && ranks.Find("no") == 0 && ranks.Find("y") == 0);
  InputRanks free;
  free.Read(R"({"input":[{"name":"x","dims":[2,"-1",-1]},{"name":"z","dims":["1"]}],"max_batch_size":1})");
  CHECK(free.forms()[0].free == std::vector<uint32_t>({2, 3}) && free.forms()[1].free.empty());
  // Whatever it is, it ends.
  const std::string text = R"({"input":[{"name":"x","dims":[1,"\"",{"a":[]}]}],"max_batch_size":2})";
  for (size_t length = 0; length <= text.size(); ++length) ranks.Read(text.substr(0, length));
  CHECK(ranks.Find("x") == 4);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 3);
  TestRanks();
  TestCallersChangeSharedMemory();
  TestEmptyTensors();
  for (const bool whole : {false, true}) {
    for (const bool early : {false, true}) TestWorkersChangeTheirOutputs(whole, early);
  }
  InputRanks ranks;
  std::string configuration = R"({"max_batch_size":8,"input":[)";
  for (int dtype = 1; dtype <= 14; ++dtype) {
    configuration += R"({"name":"x)" + std::to_string(dtype) + R"(","dims":[-1]},)";
  }
  configuration.back() = ']';
  ranks.Read(configuration + "}");
  Random random(std::stoull(arguments[1]));
  const uint64_t rounds = std::stoull(arguments[2]);
  TestInputsThatAreAlike(ranks);
  for (uint64_t i = 0; i < rounds; ++i) {
    Round(random, ranks);
    CostRound(random, ranks);
  }
}
