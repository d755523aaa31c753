// Tensors in the memory of GPUs, with the fake CUDA runtime: `devices batches SEED ROUNDS`, random batches some of whose
// tensors lie on devices or are wanted there; `devices failures`, each function of CUDA in turn fails; `devices threads
// ROUNDS`, several threads with the streams of one instance; `waits`, a copy while another one is waited for; `ends`, an
// instance that ends before its batches, and outputs that the server has no memory for.
#include <map>
#include <thread>

#include "../proxy/triton/triton_util.h"
#include "fake_cuda.h"
#include "random_batches.h"

using namespace pytriton;

namespace {

constexpr int kIllegalAddress = 700;

void* OnDevice(int device, uint64_t size) {
  int before = 0;
  void* memory = nullptr;
  CHECK(cudaGetDevice(&before) == 0 && cudaSetDevice(device) == 0);
  CHECK(cudaMalloc(&memory, size) == 0 && cudaSetDevice(before) == 0);
  return memory;
}

std::vector<void*> wanted;  // memory of devices for outputs

Place PlaceOnDevice(int device, uint64_t size) {
  wanted.push_back(OnDevice(device, size));
  return {TRITONSERVER_MEMORY_GPU, device, wanted.back()};
}

// Puts buffers of requests on devices or says that they are pinned. Their bytes on the host stay, to compare.
void Spread(Random& random, const Requests& requests) {
  for (const auto& request : requests) {
    for (auto& input : request->inputs) {
      for (const std::string& buffer : input.buffers) {
        Place& place = input.places.emplace_back();
        const auto device = static_cast<int>(Draw(random, 2));
        switch (Draw(random, 4)) {
          case 0:
            break;
          case 1:
            place.memory = TRITONSERVER_MEMORY_CPU_PINNED;
            break;
          default:
            place = {TRITONSERVER_MEMORY_GPU, device, OnDevice(device, buffer.size())};
            fake_cuda_write(place.address, buffer.data(), buffer.size());
        }
      }
    }
  }
}

void Free(const Requests& requests) {
  for (const auto& request : requests) {
    for (const auto& input : request->inputs) {
      for (const Place& place : input.places) CHECK(cudaFree(place.address) == 0);
    }
  }
  for (void* memory : wanted) CHECK(cudaFree(memory) == 0);
  wanted.clear();
}

// Answers one request as a worker does, with its inputs as outputs; strings are spoiled where `spoil`.
void Echo(Batch* batch, uint32_t place, const TRITONBACKEND_Request& request, bool decoupled, bool spoil) {
  ResponseSource answer;
  std::vector<std::string> payloads;
  for (const auto& input : request.inputs) payloads.push_back(Joined(input));
  for (size_t i = 0; i < payloads.size(); ++i) {
    const TRITONBACKEND_Input& input = request.inputs[i];
    if (spoil && input.dtype == kBytes && !payloads[i].empty()) payloads[i][0] ^= 0x40;
    TensorSource tensor{};
    tensor.name = input.name;
    tensor.dtype = input.dtype;
    tensor.first_dim = static_cast<uint32_t>(answer.dims.size());
    tensor.dims_count = static_cast<uint32_t>(input.dims.size());
    tensor.first_piece = static_cast<uint32_t>(i);
    tensor.piece_count = 1;
    tensor.length = payloads[i].size();
    answer.tensors.push_back(tensor);
    answer.dims.insert(answer.dims.end(), input.dims.begin(), input.dims.end());
    answer.pieces.push_back({payloads[i].data(), payloads[i].size()});
  }
  BatchLayout layout;
  std::string error;
  CHECK(LayoutResponse(answer, &layout, &error));
  std::vector<uint64_t> memory(layout.record_length / sizeof(uint64_t) + 1);
  auto* record = reinterpret_cast<uint8_t*>(memory.data());
  WriteResponse(answer, layout, batch->id(), record);
  auto* entry = reinterpret_cast<ResponseEntry*>(record + reinterpret_cast<RecordHeader*>(record)->entries_offset);
  entry->request = place;
  entry->flags = kResponseFinal;
  entry->rows = static_cast<uint32_t>(request.inputs[0].dims[0]);
  ResponseRecord read;
  CHECK(read.Parse(record, layout.record_length, batch->id(), batch->size(), decoupled, &error));
  batch->Respond(read);
}

bool HasStrings(const TRITONBACKEND_Request& request) {
  bool has = false;
  for (const auto& input : request.inputs) has = has || (input.dtype == kBytes && !Joined(input).empty());
  return has;
}

Requests MakeRequests(Random& random) {
  Requests requests;
  const uint64_t count = 1 + Draw(random, 8);
  const auto dtype = static_cast<uint32_t>(1 + Draw(random, 12));
  for (uint64_t i = 0; i < count; ++i) {
    requests.push_back(std::make_unique<TRITONBACKEND_Request>());
    requests.back()->id = std::string(Draw(random, 3), '-') + std::to_string(i);
    const auto rows = static_cast<int64_t>(1 + Draw(random, 3));
    requests.back()->inputs.push_back(MakeInput(random, dtype, rows));
    if (Draw(random, 3) != 0) requests.back()->inputs.push_back(MakeInput(random, kBytes, rows));
    if (Draw(random, 3) == 0) std::swap(requests.back()->inputs.front(), requests.back()->inputs.back());
  }
  return requests;
}

// Serves requests that are right, each of which gets its inputs back.
void Serve(Random& random, const Requests& requests, Devices* devices, ModelCache* cache, bool decoupled) {
  int before = 0, after = 0;
  CHECK(cudaSetDevice(static_cast<int>(Draw(random, 2))) == 0 && cudaGetDevice(&before) == 0);
  for (const auto& request : requests) {
    request->released = request->answers = 0;
    request->outputs.clear();
    request->error.clear();
  }
  std::map<TRITONBACKEND_Request*, bool> spoiled;
  {
    auto batch = MakeBatch(requests, nullptr, decoupled);
    batch->devices = devices;
    batch->cache = cache;
    std::vector<std::unique_ptr<Batch>> parts;
    if (Draw(random, 4) == 0) {
      if (auto half = batch->SplitOff(8)) parts.push_back(std::move(half));
    }
    parts.push_back(std::move(batch));
    for (auto& part : parts) {
      const std::vector<uint8_t> record = Write(part.get());
      if (part->finished()) continue;  // of which the cache had all answers
      std::vector<TRITONBACKEND_Request*> inside;
      for (uint32_t i = 0; i < part->size(); ++i) inside.push_back(part->request(i));
      CheckRecord(record, inside);
      for (uint32_t i = 0; i < inside.size(); ++i) {
        const bool spoil = Draw(random, 6) == 0 && cache == nullptr;
        spoiled[inside[i]] = spoil && HasStrings(*inside[i]);
        Echo(part.get(), i, *inside[i], decoupled, spoil);
      }
      CHECK(part->finished());
    }
  }
  for (const auto& request : requests) {
    CHECK(request->answers == 1 && request->released == 1 && request->error.empty() != spoiled[request.get()]);
    if (spoiled[request.get()]) {
      CHECK(request->error.find("output 'x13' of the worker: string ") == 0 && request->outputs.empty());
      continue;
    }
    CHECK(request->outputs.size() == request->inputs.size());
    for (size_t i = 0; i < request->inputs.size(); ++i) CHECK(request->outputs[i] == Joined(request->inputs[i]));
  }
  CHECK(cudaGetDevice(&after) == 0 && after == before);
  CHECK(in_flight == 0 && errors == 0);
}

void TestBatches(Random& random, uint64_t rounds) {
  output_place = [&random](uint64_t size) -> Place {
    const auto way = Draw(random, 4);
    if (way < 2) return {way == 0 ? TRITONSERVER_MEMORY_CPU : TRITONSERVER_MEMORY_CPU_PINNED, 0, nullptr};
    return PlaceOnDevice(static_cast<int>(way) - 2, size);
  };
  {
    Devices devices;
    for (uint64_t i = 0; i < rounds; ++i) {
      const Requests requests = MakeRequests(random);
      Spread(random, requests);
      const bool caches = Draw(random, 4) == 0;
      ModelCache cache(1000000, nullptr);
      for (int turn = 0; turn < (caches ? 2 : 1); ++turn) {
        Serve(random, requests, &devices, caches ? &cache : nullptr, !caches && Draw(random, 3) == 0);
      }
      Free(requests);
    }
    // One on each device, however many batches there are.
    CHECK(fake_cuda_streams() == 2);
  }
  CHECK(fake_cuda_streams() == 0 && fake_cuda_allocations() == 0);
}

// Which functions failed, and where an error said so.
void TestFailures() {
  may_log = true;
  std::map<std::string, int> told;
  CHECK(HasCudaRuntime());  // which asks whether it works, once
  for (int64_t failing = 0;; ++failing) {
    Devices devices;
    Requests requests;
    for (const int64_t columns : {1, 2, 3}) {
      requests.push_back(std::make_unique<TRITONBACKEND_Request>());
      const std::string bytes(static_cast<size_t>(4 * columns), static_cast<char>('0' + columns));
      requests.back()->id = std::to_string(columns);
      requests.back()->inputs.push_back({"x11", 11, {1, columns}, bytes.size(), {bytes}});
      Place place;
      // The second one's input lies on device 0, the third one's output on device 1.
      if (columns == 2) {
        place = {TRITONSERVER_MEMORY_GPU, 0, OnDevice(0, bytes.size())};
        fake_cuda_write(place.address, bytes.data(), bytes.size());
      }
      requests.back()->inputs[0].places.push_back(place);
    }
    const Place place = PlaceOnDevice(1, 12);
    output_place = [&place](uint64_t size) { return size == 12 ? place : Place{}; };
    const int64_t before = fake_cuda_calls();
    fake_cuda_fail(failing, kIllegalAddress);
    {
      auto batch = MakeBatch(requests, nullptr, false);
      batch->devices = &devices;
      Write(batch.get());
      CHECK(batch->size() >= 2);
      std::vector<TRITONBACKEND_Request*> inside;
      for (uint32_t i = 0; i < batch->size(); ++i) inside.push_back(batch->request(i));
      for (uint32_t i = 0; i < inside.size(); ++i) Echo(batch.get(), i, *inside[i], false, false);
      CHECK(batch->finished());
    }
    const bool is_through = fake_cuda_calls() - before <= failing;
    fake_cuda_fail(-1, 0);
    int wrong = 0;
    for (const auto& request : requests) {
      CHECK(request->answers == 1 && request->released == 1);
      if (request->error.empty()) {
        CHECK(request->outputs == std::vector<std::string>{Joined(request->inputs[0])});
        continue;
      }
      ++wrong;
      CHECK(request->code == TRITONSERVER_ERROR_INTERNAL && request->outputs.empty());
      const std::string input = "input 'x11': 8 bytes could not be copied from GPU 0 to the host: ";
      const std::string output = "output 'x11': 12 bytes could not be copied from the host to GPU 1: ";
      const size_t begin = request->error.find(input) == 0 ? input.size() : output.size();
      CHECK(request->error.find(input) == 0 || request->error.find(output) == 0);
      const std::string reason = request->error.substr(begin);
      const size_t end = reason.find(' ');
      CHECK(reason.substr(end) ==
            " failed with cudaErrorIllegalAddress (700): an illegal memory access was encountered");
      ++told[reason.substr(0, end)];
    }
    // The first one has nothing to do with devices.
    CHECK(requests[0]->error.empty() && wrong <= 1);
    int device = 7;
    CHECK(cudaGetDevice(&device) == 0 && cudaSetDevice(0) == 0);
    // Only where what failed was to make it current again, it is another one.
    CHECK(device == 0 || wrong == 0);
    Free(requests);
    if (is_through) break;
  }
  CHECK(told.size() == 5 && told["cudaMemcpyAsync"] == 2 && told["cudaStreamSynchronize"] == 2);
  CHECK(told["cudaGetDevice"] == 2 && told["cudaStreamCreate"] == 2 && told["cudaSetDevice"] == 1);
  CHECK(fake_cuda_streams() == 0 && errors == 0);
}

void TestThreads(int rounds) {
  Devices devices;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&devices, rounds, t] {
      std::vector<uint8_t> bytes(1000, static_cast<uint8_t>(t)), back(1000);
      void* const memory = OnDevice(t % 2, bytes.size());
      for (int i = 0; i < rounds; ++i) {
        const auto fails = [](const DeviceCopy&, const std::string&) { CHECK(false); };
        bytes[static_cast<size_t>(i) % bytes.size()] ^= 1;
        devices.Copy({{"y", true, memory, bytes.data(), bytes.size(), t % 2, 0}}, fails);
        devices.Copy({{"x", false, back.data(), memory, bytes.size(), t % 2, 0}}, fails);
        CHECK(back == bytes);
      }
      CHECK(cudaFree(memory) == 0);
    });
  }
  for (auto& thread : threads) thread.join();
}

Devices* waited_for = nullptr;

// Another thread's copy is done while the first one waits for its stream.
void TestWaits() {
  Devices devices;
  waited_for = &devices;
  const auto fails = [](const DeviceCopy&, const std::string&) { CHECK(false); };
  const std::string bytes = "abcdefgh";
  void* const memory = OnDevice(0, bytes.size());
  fake_cuda_while_waiting([] {
    fake_cuda_while_waiting(nullptr);
    std::thread([] {
      const std::string others = "ijkl";
      std::string back(others.size(), '\0');
      void* const other = OnDevice(0, others.size());
      const auto wrong = [](const DeviceCopy&, const std::string&) { CHECK(false); };
      waited_for->Copy({{"y", true, other, others.data(), others.size(), 0, 0}}, wrong);
      waited_for->Copy({{"x", false, &back[0], other, others.size(), 0, 0}}, wrong);
      CHECK(back == others && cudaFree(other) == 0);
    }).join();
  });
  std::string back(bytes.size(), '\0');
  for (int turn = 0; turn < 3; ++turn) {
    devices.Copy({{"y", true, memory, bytes.data(), bytes.size(), 0, 0}}, fails);
    devices.Copy({{"x", false, &back[0], memory, bytes.size(), 0, 0}}, fails);
    CHECK(back == bytes);
  }
  // No more than were in use at the same time.
  CHECK(fake_cuda_streams() == 2 && cudaFree(memory) == 0);
}

Requests OnDevices(std::initializer_list<int64_t> sizes) {
  Requests requests;
  for (const int64_t columns : sizes) {
    const std::string bytes(static_cast<size_t>(4 * columns), static_cast<char>('0' + columns));
    requests.push_back(std::make_unique<TRITONBACKEND_Request>());
    requests.back()->inputs.push_back({"x11", 11, {1, columns}, bytes.size(), {bytes}});
    const Place place{TRITONSERVER_MEMORY_GPU, 0, OnDevice(0, bytes.size())};
    fake_cuda_write(place.address, bytes.data(), bytes.size());
    requests.back()->inputs[0].places.push_back(place);
  }
  return requests;
}

// A load of the model takes the instance away while workers are at its batches: they are answered all the same, with what
// was the instance's, and Triton is not called with it any more.
void TestEnds() {
  output_place = [](uint64_t size) { return PlaceOnDevice(1, size); };
  for (const bool ends : {false, true}) {
    reports = 0;
    Requests requests = OnDevices({1, 2});
    {
      auto state = std::make_shared<InstanceState>();
      auto batch = MakeBatch(requests, nullptr, false);
      batch->Use(state);
      Write(batch.get());
      auto half = batch->SplitOff(8);
      if (ends) state->End();
      state.reset();
      Echo(half.get(), 0, *requests[0], false, false);
      Echo(batch.get(), 0, *requests[1], false, false);
      CHECK(half->finished() && batch->finished());
    }
    for (const auto& request : requests) {
      CHECK(request->error.empty() && request->outputs == std::vector<std::string>{Joined(request->inputs[0])});
    }
    CHECK(reports == (ends ? 0 : 4));
    Free(requests);
  }
  CHECK(fake_cuda_streams() == 0 && fake_cuda_allocations() == 0);
}

// The request has an error that says so; the other one of the batch is answered.
void TestNoMemory() {
  for (const TRITONSERVER_MemoryType memory : {TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU}) {
    output_place = [memory](uint64_t size) { return size == 8 ? Place{memory, 0, nullptr} : Place{}; };
    lacks_memory = [](uint64_t size) { return size == 8; };
    Requests requests = OnDevices({1, 2});
    {
      auto batch = MakeBatch(requests, nullptr, false);
      batch->Use(std::make_shared<InstanceState>());
      Write(batch.get());
      for (uint32_t i = 0; i < 2; ++i) Echo(batch.get(), i, *requests[i], false, false);
      CHECK(batch->finished());
    }
    CHECK(requests[0]->error.empty() && requests[0]->outputs == std::vector<std::string>{Joined(requests[0]->inputs[0])});
    CHECK(requests[1]->error == "output 'x11': the server has no memory for its 8 bytes");
    CHECK(requests[1]->code == TRITONSERVER_ERROR_INTERNAL && requests[1]->answers == 1 && requests[1]->released == 1);
    lacks_memory = nullptr;
    Free(requests);
  }
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count >= 2);
  take_output = [](const Place& place, uint64_t size) {
    std::string bytes(size, '\0');
    fake_cuda_read(place.address, &bytes[0], size);
    return bytes;
  };
  const std::string way = arguments[1];
  if (way == "failures") {
    TestFailures();
  } else if (way == "threads") {
    TestThreads(std::stoi(arguments[2]));
  } else if (way == "waits") {
    TestWaits();
  } else if (way == "ends") {
    TestEnds();
    TestNoMemory();
  } else {
    Random random(std::stoull(arguments[2]));
    TestBatches(random, std::stoull(arguments[3]));
  }
}
