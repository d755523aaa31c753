#include "devices.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <type_traits>
#include <utility>

#include "triton_util.h"

namespace pytriton {

namespace {

constexpr int kHostToDevice = 1;
constexpr int kDeviceToHost = 2;
constexpr char kNoRuntime[] = "no CUDA runtime (libcudart) is loaded in this process";

// As in CUDA's `cuda_runtime_api.h`, whose enumerations are ints and whose streams are pointers, in each of its versions.
struct CudaRuntime {
  int (*GetDevice)(int* device);
  int (*SetDevice)(int device);
  int (*StreamCreate)(void** stream);
  int (*StreamDestroy)(void* stream);
  int (*StreamSynchronize)(void* stream);
  int (*MemcpyAsync)(void* to, const void* from, size_t size, int kind, void* stream);
  int (*GetLastError)();
  const char* (*GetErrorName)(int error);
  const char* (*GetErrorString)(int error);

  // Whether `library` has all of it.
  bool Find(void* library) {
    const auto find = [library](const char* name, auto* function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      return *function != nullptr;
    };
    return find("cudaGetDevice", &GetDevice) && find("cudaSetDevice", &SetDevice) &&
           find("cudaStreamCreate", &StreamCreate) && find("cudaStreamDestroy", &StreamDestroy) &&
           find("cudaStreamSynchronize", &StreamSynchronize) && find("cudaMemcpyAsync", &MemcpyAsync) &&
           find("cudaGetLastError", &GetLastError) && find("cudaGetErrorName", &GetErrorName) &&
           find("cudaGetErrorString", &GetErrorString);
  }

  // What a failed call says; empty where it did not fail. Nobody else in this thread is to find the error.
  std::string Failure(const char* function, int error) const {
    if (error == 0) return "";
    GetLastError();
    return std::string(function) + " failed with " + GetErrorName(error) + " (" + std::to_string(error) +
           "): " + GetErrorString(error);
  }
};

// Where a process keeps the symbols of its Triton to itself, as Python does, only the library's own handle leads to them.
// Its file has a version in its name, and of a wheel a digest, too.
void FindLibraries(std::vector<void*>* found) {
  const auto look = [](dl_phdr_info* info, size_t, void* paths) {
    const char* slash = std::strrchr(info->dlpi_name, '/');
    const char* name = slash == nullptr ? info->dlpi_name : slash + 1;
    if (std::strncmp(name, "libcudart", 9) == 0) static_cast<std::vector<std::string>*>(paths)->push_back(info->dlpi_name);
    return 0;
  };
  std::vector<std::string> paths;
  dl_iterate_phdr(look, &paths);
  for (const std::string& path : paths) {
    // Kept open: its functions are called from now on.
    if (void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) found->push_back(library);
  }
}

std::atomic<void*> preferred_library{nullptr};

// Null where the process has none. Of several, as where frameworks bring their own, that of Triton, or else the first that
// works. One that does not is asked again, as it may have come before its driver.
const CudaRuntime* Runtime() {
  static std::atomic<const CudaRuntime*> working{nullptr};
  const CudaRuntime* runtime = working.load(std::memory_order_acquire);
  if (runtime != nullptr) return runtime;
  static std::mutex mutex;
  static auto* const known = new std::list<std::pair<void*, CudaRuntime>>();  // never moved, as threads may use them
  const std::lock_guard<std::mutex> lock(mutex);
  runtime = working.load(std::memory_order_relaxed);
  if (runtime != nullptr) return runtime;
  std::vector<void*> libraries{RTLD_DEFAULT};
  if (void* const preferred = preferred_library.load(std::memory_order_acquire)) libraries.insert(libraries.begin(), preferred);
  FindLibraries(&libraries);
  const CudaRuntime* first = nullptr;
  for (void* const library : libraries) {
    auto place = std::find_if(known->begin(), known->end(), [library](const auto& each) { return each.first == library; });
    if (place == known->end()) {
      CudaRuntime found;
      if (!found.Find(library)) continue;
      place = known->emplace(known->end(), library, found);
    }
    if (first == nullptr) first = &place->second;
    int device = 0;
    if (!place->second.Failure("cudaGetDevice", place->second.GetDevice(&device)).empty()) continue;
    working.store(&place->second, std::memory_order_release);
    return &place->second;
  }
  return first;
}

std::string Describe(const DeviceCopy& copy) {
  const std::string gpu = "GPU " + std::to_string(copy.device);
  return std::string(copy.to_device ? "output '" : "input '") + std::string(copy.tensor) + "': " +
         std::to_string(copy.size) + " bytes could not be copied " +
         (copy.to_device ? "from the host to " + gpu : "from " + gpu + " to the host") + ": ";
}

// Makes a device current, and in the end the one that was before.
class CurrentDevice {
 public:
  CurrentDevice(const CudaRuntime& runtime, int32_t device) : runtime_(runtime) {
    error_ = runtime_.Failure("cudaGetDevice", runtime_.GetDevice(&before_));
    if (!error_.empty() || before_ == device) return;
    error_ = runtime_.Failure("cudaSetDevice", runtime_.SetDevice(device));
    changed_ = error_.empty();
  }
  ~CurrentDevice() {
    if (!changed_) return;
    const std::string error = runtime_.Failure("cudaSetDevice", runtime_.SetDevice(before_));
    if (!error.empty()) {
      PYTRITON_LOG(ERROR, "GPU " + std::to_string(before_) + " could not be made a thread's current device again: " + error);
    }
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  const std::string& error() const { return error_; }

 private:
  const CudaRuntime& runtime_;
  int before_ = 0;
  bool changed_ = false;
  std::string error_;
};

}  // namespace

void PreferCudaRuntimeOf(void* library) { preferred_library.store(library, std::memory_order_release); }

bool HasCudaRuntime() { return Runtime() != nullptr; }

std::string WaitForDefaultStream(int32_t device) {
  if (!HasCudaRuntime()) return kNoRuntime;
  const CurrentDevice current(*Runtime(), device);
  return current.error().empty() ? Runtime()->Failure("cudaStreamSynchronize", Runtime()->StreamSynchronize(nullptr))
                                 : current.error();
}

Devices::~Devices() {
  for (const Stream& stream : free_) {
    const std::string error = Runtime()->Failure("cudaStreamDestroy", Runtime()->StreamDestroy(stream.handle));
    if (!error.empty()) PYTRITON_LOG(WARN, "a stream on GPU " + std::to_string(stream.device) + " is left: " + error);
  }
}

void* Devices::TakeStream(int32_t device, std::string* error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Stream& stream : free_) {
      if (stream.device != device) continue;
      void* const handle = stream.handle;
      stream = free_.back();
      free_.pop_back();
      return handle;
    }
    free_.reserve(made_ + 1);
    ++made_;
  }
  // It waits for the default stream, as those of Triton's own backends do.
  void* made = nullptr;
  *error = Runtime()->Failure("cudaStreamCreate", Runtime()->StreamCreate(&made));
  return error->empty() ? made : nullptr;
}

void Devices::GiveBack(const Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(stream);
}

void Devices::CopyOn(int32_t device, const std::vector<DeviceCopy>& copies, std::vector<std::string>* outcomes) {
  const CudaRuntime& runtime = *Runtime();
  const CurrentDevice current(runtime, device);
  std::string error = current.error();
  void* const stream = error.empty() ? TakeStream(device, &error) : nullptr;
  for (size_t i = 0; error.empty() && i < copies.size(); ++i) {
    const DeviceCopy& copy = copies[i];
    if (copy.device != device) continue;
    const int kind = copy.to_device ? kHostToDevice : kDeviceToHost;
    (*outcomes)[i] =
        runtime.Failure("cudaMemcpyAsync", runtime.MemcpyAsync(copy.to, copy.from, copy.size, kind, stream));
  }
  // Also where some could not be queued: the others read and write memory that is somebody else's soon.
  if (stream != nullptr) {
    error = runtime.Failure("cudaStreamSynchronize", runtime.StreamSynchronize(stream));
    GiveBack({device, stream});
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].device == device && (*outcomes)[i].empty()) (*outcomes)[i] = error;
  }
}

void Devices::Copy(const std::vector<DeviceCopy>& copies, const Failed& failed) {
  std::vector<std::string> outcomes(copies.size());
  std::vector<int32_t> devices;
  for (const DeviceCopy& copy : copies) {
    if (std::find(devices.begin(), devices.end(), copy.device) == devices.end()) devices.push_back(copy.device);
  }
  if (HasCudaRuntime()) {
    // Each caller has streams of its own meanwhile: it waits for its own copies alone, and finds what is wrong with these.
    for (const int32_t device : devices) CopyOn(device, copies, &outcomes);
  } else {
    outcomes.assign(copies.size(), kNoRuntime);
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    if (!outcomes[i].empty()) failed(copies[i], Describe(copies[i]) + outcomes[i]);
  }
}

}  // namespace pytriton
