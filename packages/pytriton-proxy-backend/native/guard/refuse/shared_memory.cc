#include "shared_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "../hooks.h"
#include "../in_force.h"
#include "../protections.h"
#include "refusals.h"
#include "shape_check.h"
#include "shared_mappings.h"

namespace pytriton::guard {
namespace {

// The shared memory for which the starter asks to find out what is in force.
constexpr char kTriedFile[] = "/pytriton-self-test";
constexpr off_t kTriedBytes = 4096;

// The last file of shared memory that this thread has opened and not mapped yet.
thread_local int t_shared_file = -1;

}  // namespace

int OpenSharedMemory(const char* name, int flags, mode_t mode, bool is_for_caller) {
  const auto next = NEXT(shm_open);
  Guard* const guard = Refusing();
  if (guard != nullptr && is_for_caller) {
    Reach(Protection::kSharedMemory);
    if (name != nullptr && std::strstr(name, guard->python_backend_prefix.c_str()) != nullptr) {
      LogRefusal("shared memory of the Python backend, " + NameText(name) + ", is not for callers");
      errno = EACCES;
      return -1;
    }
    if (!guard->listeners.is_tried()) guard->has_shared_memory.store(true, std::memory_order_relaxed);
  }
  if (next == nullptr) {
    errno = ENOSYS;
    return -1;
  }
  if (guard != nullptr && guard->listeners.is_tried() && name != nullptr && std::strcmp(name, kTriedFile) == 0) {
    // The region cannot be made from this file, because it was not opened here. So `mmap` is tried as well, and nothing
    // is left behind.
    const int file = static_cast<int>(syscall(SYS_memfd_create, "pytriton-self-test", 1 /* MFD_CLOEXEC */));
    (void)!ftruncate(file, kTriedBytes);
    return file;
  }
  return t_shared_file = next(name, flags, mode);
}

// The front ends map only callers' shared memory. For a second region of one file, they use the number that its
// descriptor had before it was closed, which may be that of any other file by now.
void* MapSharedMemory(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  const auto next = NEXT(mmap);
  if (Refusing() == nullptr) return next(address, length, protection, flags, fd, offset);
  Reach(Protection::kSharedFiles);
  if (std::exchange(t_shared_file, -1) != fd) {
    LogRefusal("a region of shared memory has the file of another one that is registered: give each a file of its own");
    errno = EBADF;
    return MAP_FAILED;
  }
  void* const mapped = next(address, length, protection, flags, fd, offset);
  if (mapped != MAP_FAILED) AddSharedMapping(mapped, length);
  return mapped;
}

}  // namespace pytriton::guard
