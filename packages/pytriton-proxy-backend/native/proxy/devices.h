// Copies between the memory of GPUs and that of the host, by the CUDA runtime that the server has loaded. Nothing of CUDA
// is linked or loaded by us: where no tensor lies on a device, none of it is looked for.
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

// The library, a handle of dlopen, whose CUDA runtime is taken where it has one that works.
void PreferCudaRuntimeOf(void* library);

// Waits for the default stream of a device. Returns what is wrong; empty where nothing is.
std::string WaitForDefaultStream(int32_t device);

struct DeviceCopy {
  std::string_view tensor;
  bool to_device;  // an output; else an input, which is copied to the host
  void* to;
  const void* from;
  uint64_t size;
  int32_t device;
  uint32_t request;  // whose tensor it is
};

// What one model instance copies, on streams of its own: as many on each device as threads copied at the same time.
class Devices {
 public:
  // (a copy, what is wrong)
  using Failed = std::function<void(const DeviceCopy&, const std::string&)>;

  Devices() = default;
  ~Devices();
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  // Does all copies, and returns when nothing of CUDA reads or writes their memory any more. Calls `failed` for each that
  // was not done. The current device of the thread is what it was before.
  void Copy(const std::vector<DeviceCopy>& copies, const Failed& failed);

 private:
  struct Stream {
    int32_t device;
    void* handle;
  };

  // What came of one copy: empty where it was done.
  void CopyOn(int32_t device, const std::vector<DeviceCopy>& copies, std::vector<std::string>* outcomes);
  // A stream on the current device, which nobody else uses until it is given back.
  void* TakeStream(int32_t device, std::string* error);
  void GiveBack(const Stream& stream);

  std::mutex mutex_;
  size_t made_ = 0;
  std::vector<Stream> free_;  // has room for all that were made
};

}  // namespace pytriton
