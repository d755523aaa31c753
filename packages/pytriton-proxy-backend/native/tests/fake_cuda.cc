// A CUDA runtime without a GPU, as strict as the real one may be. Memory of a device is an address that faults when the
// host touches it; its bytes lie elsewhere. Copies that are queued on a stream run when somebody waits for that stream, so
// whoever forgets to finds wrong bytes. A copy on a stream that was made is refused where another device than that of the
// stream and of the memory is current.
//
// As a library before that of a tritonserver, it reads environment variables: FAKE_CUDA_DEVICES, how many there are (2
// where it is unset); FAKE_CUDA_FAIL, a file that names a function and its error, as long as it is there; FAKE_CUDA_LOG, a
// file to which each call adds a line.
#include "fake_cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {

constexpr int kInvalidValue = 1, kMemoryAllocation = 2, kInvalidDevice = 101, kInvalidResourceHandle = 400;
constexpr int kToDevice = 1, kToHost = 2, kOnDevice = 3, kDefault = 4;

constexpr uint64_t kDeviceBytes = uint64_t{1} << 33;

struct Memory {
  uint64_t size;
  int device;
  uint8_t* bytes;
};

struct Copy {
  void* to;
  const void* from;
  uint64_t size;
};

struct Stream {
  int device;
  std::vector<Copy> copies;
};

struct Fake {
  std::mutex mutex;
  std::map<uintptr_t, Memory> memory;
  std::set<Stream*> streams;
  Stream usual{0, {}};  // the one without a handle, of any device
  int64_t calls = 0, failing_call = -1, synchronised = 0;
  int failing_error = 0;
};

// Never destroyed: servers end with threads that still call.
Fake& fake = *new Fake;
std::atomic<void (*)()> while_waiting{nullptr};
thread_local int current_device = 0;
thread_local int last_error = 0;

int Devices() {
  static const int count = [] {
    const char* text = std::getenv("FAKE_CUDA_DEVICES");
    return text == nullptr ? 2 : std::atoi(text);
  }();
  return count;
}

void Log(const char* function, uint64_t size, int device, int result) {
  static const char* const path = std::getenv("FAKE_CUDA_LOG");
  if (path == nullptr) return;
  FILE* const file = std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file, "%s %llu %d %d\n", function, static_cast<unsigned long long>(size), device, result);
  std::fclose(file);
}

// What the environment says of a function.
int FailureOf(const char* function) {
  static const char* const path = std::getenv("FAKE_CUDA_FAIL");
  FILE* const file = path == nullptr ? nullptr : std::fopen(path, "r");
  if (file == nullptr) return 0;
  char name[64] = "";
  int error = 0;
  const bool named = std::fscanf(file, "%63s %d", name, &error) == 2 && std::strcmp(name, function) == 0;
  std::fclose(file);
  return named ? error : 0;
}

// With the lock, at the beginning of each function that a program can have fail.
int Enter(const char* function) {
  const int64_t call = fake.calls++;
  return call == fake.failing_call ? fake.failing_error : FailureOf(function);
}

int Leave(const char* function, int result, uint64_t size = 0) {
  Log(function, size, current_device, result);
  if (result != 0) last_error = result;
  return result;
}

// With the lock. Null if an address is not that of a device.
const Memory* Find(const void* address, uint64_t* offset) {
  auto found = fake.memory.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == fake.memory.begin()) return nullptr;
  --found;
  *offset = reinterpret_cast<uintptr_t>(address) - found->first;
  return *offset < found->second.size ? &found->second : nullptr;
}

// With the lock. Where the bytes of an address lie, of the host or of a device. It is null if they end too early, or
// are those of a device that is not the current one, which the real one would allow.
uint8_t* Bytes(const void* address, uint64_t size, bool on_device, bool any_device) {
  uint64_t offset = 0;
  const Memory* memory = Find(address, &offset);
  if ((memory != nullptr) != on_device) return nullptr;
  if (memory == nullptr) return static_cast<uint8_t*>(const_cast<void*>(address));
  if (size > memory->size - offset || (!any_device && memory->device != current_device)) return nullptr;
  return memory->bytes + offset;
}

void Run(Stream* stream) {
  for (const Copy& copy : stream->copies) std::memcpy(copy.to, copy.from, copy.size);
  stream->copies.clear();
}

int Queue(void* to, const void* from, uint64_t size, int kind, Stream* stream) {
  uint64_t offset = 0;
  const bool to_device = kind == kDefault ? Find(to, &offset) != nullptr : kind == kToDevice || kind == kOnDevice;
  const bool from_device = kind == kDefault ? Find(from, &offset) != nullptr : kind == kToHost || kind == kOnDevice;
  if (stream == nullptr) stream = &fake.usual;
  if (stream != &fake.usual && fake.streams.count(stream) == 0) return kInvalidResourceHandle;
  if (stream != &fake.usual && stream->device != current_device) return kInvalidResourceHandle;
  uint8_t* const target = Bytes(to, size, to_device, stream == &fake.usual);
  const uint8_t* const source = Bytes(from, size, from_device, stream == &fake.usual);
  if (target == nullptr || source == nullptr) return kInvalidValue;
  stream->copies.push_back({target, source, size});
  return 0;
}

size_t InPages(size_t size) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (std::max<size_t>(size, 1) + page - 1) / page * page;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))
#define LOCKED const std::lock_guard<std::mutex> lock(fake.mutex)

// ---- for tests -------------------------------------------------------------------------------------------------------

FAKE void fake_cuda_fail(int64_t calls, int error) {
  LOCKED;
  fake.failing_call = calls < 0 ? -1 : fake.calls + calls;
  fake.failing_error = error;
}
FAKE int64_t fake_cuda_calls() {
  LOCKED;
  return fake.calls;
}
FAKE int64_t fake_cuda_streams() {
  LOCKED;
  return static_cast<int64_t>(fake.streams.size());
}
FAKE int64_t fake_cuda_allocations() {
  LOCKED;
  return static_cast<int64_t>(fake.memory.size());
}
FAKE void fake_cuda_while_waiting(void (*function)()) { while_waiting = function; }
FAKE int64_t fake_cuda_synchronised() {
  LOCKED;
  return fake.synchronised;
}
FAKE void fake_cuda_read(const void* from, void* to, uint64_t size) {
  LOCKED;
  if (size != 0) std::memcpy(to, Bytes(from, size, true, true), size);
}
FAKE void fake_cuda_write(void* to, const void* from, uint64_t size) {
  LOCKED;
  if (size != 0) std::memcpy(Bytes(to, size, true, true), from, size);
}

// ---- memory ----------------------------------------------------------------------------------------------------------

FAKE int cudaMalloc(void** memory, size_t size) {
  LOCKED;
  const size_t length = InPages(size);
  void* const address = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* const bytes = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED || bytes == MAP_FAILED) return Leave("cudaMalloc", kMemoryAllocation, size);
  fake.memory[reinterpret_cast<uintptr_t>(address)] = {std::max<size_t>(size, 1), current_device, static_cast<uint8_t*>(bytes)};
  *memory = address;
  return Leave("cudaMalloc", 0, size);
}
FAKE int cudaFree(void* memory) {
  LOCKED;
  if (memory == nullptr) return 0;
  const auto found = fake.memory.find(reinterpret_cast<uintptr_t>(memory));
  if (found == fake.memory.end()) return Leave("cudaFree", kInvalidValue);
  munmap(memory, InPages(found->second.size));
  munmap(found->second.bytes, InPages(found->second.size));
  fake.memory.erase(found);
  return Leave("cudaFree", 0);
}
FAKE int cudaHostAlloc(void** memory, size_t size, unsigned int) {
  *memory = std::calloc(1, std::max<size_t>(size, 1));
  return *memory == nullptr ? kMemoryAllocation : 0;
}
FAKE int cudaFreeHost(void* memory) {
  std::free(memory);
  return 0;
}
// There is no memory that both sides see.
FAKE int cudaMallocManaged(void**, size_t, unsigned int) { return kMemoryAllocation; }
FAKE int cudaMemPrefetchAsync(const void*, size_t, int, void*) { return kInvalidValue; }
FAKE int cudaMemGetInfo(size_t* available, size_t* total) {
  *available = *total = kDeviceBytes;
  return 0;
}
FAKE int cudaMemset(void* memory, int value, size_t size) {
  LOCKED;
  uint8_t* const bytes = Bytes(memory, size, true, true);
  if (bytes == nullptr) return Leave("cudaMemset", kInvalidValue, size);
  std::memset(bytes, value, size);
  return Leave("cudaMemset", 0, size);
}

// ---- copies ----------------------------------------------------------------------------------------------------------

FAKE int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  LOCKED;
  int result = Enter("cudaMemcpyAsync");
  if (result == 0) result = Queue(to, from, size, kind, static_cast<Stream*>(stream));
  return Leave("cudaMemcpyAsync", result, size);
}
FAKE int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  LOCKED;
  const int result = Queue(to, from, size, kind, nullptr);
  Run(&fake.usual);
  return Leave("cudaMemcpy", result, size);
}

// ---- streams ---------------------------------------------------------------------------------------------------------

FAKE int cudaStreamCreate(void** stream) {
  LOCKED;
  const int result = Enter("cudaStreamCreate");
  if (result != 0) return Leave("cudaStreamCreate", result);
  auto* made = new Stream{current_device, {}};
  fake.streams.insert(made);
  *stream = made;
  return Leave("cudaStreamCreate", 0);
}
FAKE int cudaStreamDestroy(void* stream) {
  LOCKED;
  const auto found = fake.streams.find(static_cast<Stream*>(stream));
  if (found == fake.streams.end()) return Leave("cudaStreamDestroy", kInvalidResourceHandle);
  // What is queued is never done.
  delete *found;
  fake.streams.erase(found);
  return Leave("cudaStreamDestroy", 0);
}
// One that fails has done its work all the same, or will: as the real one, it says nothing of that.
FAKE int cudaStreamSynchronize(void* stream) {
  if (void (*const function)() = while_waiting.load()) function();
  LOCKED;
  const int result = Enter("cudaStreamSynchronize");
  Stream* const waited = stream == nullptr ? &fake.usual : static_cast<Stream*>(stream);
  if (waited != &fake.usual && fake.streams.count(waited) == 0) return Leave("cudaStreamSynchronize", kInvalidResourceHandle);
  ++fake.synchronised;
  Run(waited);
  return Leave("cudaStreamSynchronize", result);
}
FAKE int cudaStreamGetFlags(void*, unsigned int* flags) {
  *flags = 0;
  return 0;
}
FAKE int cudaLaunchHostFunc(void*, void (*function)(void*), void* data) {
  function(data);
  return 0;
}

// ---- devices ---------------------------------------------------------------------------------------------------------

FAKE int cudaGetDeviceCount(int* count) {
  *count = Devices();
  return *count > 0 ? 0 : 100;
}
FAKE int cudaGetDevice(int* device) {
  LOCKED;
  const int result = Enter("cudaGetDevice");
  *device = current_device;
  return Leave("cudaGetDevice", result);
}
FAKE int cudaSetDevice(int device) {
  LOCKED;
  int result = Enter("cudaSetDevice");
  if (result == 0 && (device < 0 || device >= Devices())) result = kInvalidDevice;
  if (result == 0) current_device = device;
  return Leave("cudaSetDevice", result);
}
// The structure of CUDA 12, of which its memory and the compute capability are asked for.
FAKE int cudaGetDeviceProperties_v2(void* properties, int) {
  std::memset(properties, 0, 1032);
  std::strcpy(static_cast<char*>(properties), "Fake GPU");
  const uint64_t memory = kDeviceBytes;
  std::memcpy(static_cast<char*>(properties) + 288, &memory, sizeof(memory));
  const int capability[2] = {9, 0};
  std::memcpy(static_cast<char*>(properties) + 360, capability, sizeof(capability));
  return 0;
}
FAKE int cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<size_t>(length), "0000:0%d:00.0", device);
  return 0;
}
FAKE int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return 0;
}
FAKE int cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}
FAKE int cudaDeviceEnablePeerAccess(int, unsigned int) { return kInvalidDevice; }

// ---- errors ----------------------------------------------------------------------------------------------------------

FAKE int cudaGetLastError() {
  const int error = last_error;
  last_error = 0;
  return error;
}
FAKE int cudaPeekAtLastError() { return last_error; }
FAKE const char* cudaGetErrorName(int error) {
  switch (error) {
    case 0:
      return "cudaSuccess";
    case kInvalidValue:
      return "cudaErrorInvalidValue";
    case kMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case kInvalidDevice:
      return "cudaErrorInvalidDevice";
    case kInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case 700:
      return "cudaErrorIllegalAddress";
    default:
      return "unrecognized error code";
  }
}
FAKE const char* cudaGetErrorString(int error) {
  return error == 700 ? "an illegal memory access was encountered" : cudaGetErrorName(error);
}
