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

// The functions as CUDA's `cuda_runtime_api.h` declares them; in every version, its enumerations are ints and its
// streams are pointers.
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

  // Looks the functions up; returns whether `library` has them all.
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

  // Describes the error of a call; "" if it succeeded. Also clears the error, so that nobody else in this thread finds
  // it.
  std::string Failure(const char* function, int error) const {
    if (error == 0) return "";
    GetLastError();
    return std::string(function) + " failed with " + GetErrorName(error) + " (" + std::to_string(error) +
           "): " + GetErrorString(error);
  }
};

// A process may keep the symbols of its libraries to themselves, as Python does; then only the handle of the library
// leads to them. The file is found by its beginning, because its name has a version and in wheels also a digest.
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
    // The library stays open, because its functions are called from now on.
    if (void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) found->push_back(library);
  }
}

std::atomic<void*> preferred_library{nullptr};

// Returns the CUDA runtime, or null if the process has none that works. If there are several, because frameworks bring
// their own, Triton's is taken, or else the first that works. One that does not work is tried again later, because its
// driver may be loaded by then.
const CudaRuntime* Runtime() {
  static std::atomic<const CudaRuntime*> working{nullptr};
  const CudaRuntime* runtime = working.load(std::memory_order_acquire);
  if (runtime != nullptr) return runtime;
  static std::mutex mutex;
  // elements never move, because threads use them
  static auto* const known = new std::list<std::pair<void*, CudaRuntime>>();
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

// Makes a device current, and afterwards the one that was current before.
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
  // A stream made by this function waits for the default stream, as the streams of Triton's own backends do.
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
  // The stream is waited for even if some copies could not be queued, because the memory of the other ones will soon be
  // used for something else.
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
    // Each thread uses streams of its own here, so it waits only for its own copies and sees only their errors.
    for (const int32_t device : devices) CopyOn(device, copies, &outcomes);
  } else {
    outcomes.assign(copies.size(), kNoRuntime);
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    if (!outcomes[i].empty()) failed(copies[i], Describe(copies[i]) + outcomes[i]);
  }
}

}  // namespace pytriton
