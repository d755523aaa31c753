// Copies between the memory of GPUs and of the host, by the CUDA runtime that the server has loaded. This library
// neither links nor loads CUDA, and does not look for it before a tensor lies on a device.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace pytriton {

// Whether a CUDA runtime is loaded in this process. Looks for one as long as there is none.
bool HasCudaRuntime();

// Sets the library, a handle of dlopen, whose CUDA runtime is preferred if it has one that works.
void PreferCudaRuntimeOf(void* library);

// Waits for the default stream of a device. Returns an error text, or "".
std::string WaitForDefaultStream(int32_t device);

struct DeviceCopy {
  std::string_view tensor;
  bool to_device;  // true for an output; false for an input, which is copied to the host
  void* to;
  const void* from;
  uint64_t size;
  int32_t device;
  uint32_t request;  // the request that the tensor belongs to
};

// The copies of one model instance, on streams of its own: on each device as many as threads have copied at the same
// time.
class Devices {
 public:
  // Is called with a copy and its error.
  using Failed = std::function<void(const DeviceCopy&, const std::string&)>;

  Devices() = default;
  ~Devices();
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  // Does all copies, and returns when CUDA has finished with their memory. Calls `failed` for each copy that was not
  // done. The thread's current device is the same afterwards.
  void Copy(const std::vector<DeviceCopy>& copies, const Failed& failed);

 private:
  struct Stream {
    int32_t device;
    void* handle;
  };

  // Does the copies of one device and sets their error texts, "" for success.
  void CopyOn(int32_t device, const std::vector<DeviceCopy>& copies, std::vector<std::string>* outcomes);
  // Returns a stream on the current device that nobody else uses until it is given back.
  void* TakeStream(int32_t device, std::string* error);
  void GiveBack(const Stream& stream);

  std::mutex mutex_;
  size_t made_ = 0;
  std::vector<Stream> free_;  // its capacity is enough for all streams that exist
};

}  // namespace pytriton
