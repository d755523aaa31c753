#include "startup.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "../proxy/text/printable.h"

namespace pytriton::guard {

namespace {

constexpr char kPreload[] = "LD_PRELOAD";

// The address range of the program, which is the first entry of the loader's list.
struct Range {
  uintptr_t begin = UINTPTR_MAX;
  uintptr_t end = 0;
};

int FindProgram(dl_phdr_info* info, size_t, void* data) {
  auto* range = static_cast<Range*>(data);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    if (begin < range->begin) range->begin = begin;
    if (begin + header.p_memsz > range->end) range->end = begin + header.p_memsz;
  }
  return 1;  // the first is the program
}

// Whether an entry of LD_PRELOAD is this library. If its path has blanks, at which the loader would split it, the entry
// is the path of a descriptor.
bool IsThisLibrary(const std::string& entry) {
  constexpr char kDescriptor[] = "/proc/self/fd/";
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&IsThisLibrary), &info) != 0 && info.dli_fname != nullptr &&
      entry == info.dli_fname) {
    if (entry.rfind(kDescriptor, 0) == 0) fcntl(std::atoi(entry.c_str() + sizeof(kDescriptor) - 1), F_SETFD, FD_CLOEXEC);
    return true;
  }
  const size_t slash = entry.rfind('/');
  return entry.substr(slash == std::string::npos ? 0 : slash + 1) == kGuardLibraryName;
}

void RemoveFromPreload() {
  const char* preload = std::getenv(kPreload);
  if (preload == nullptr) return;
  const std::string all = preload;
  std::string others;
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = std::min(all.find_first_of(": ", begin), all.size());
    const std::string entry = all.substr(begin, end - begin);
    if (!entry.empty() && !IsThisLibrary(entry)) {
      others += (others.empty() ? "" : ":") + entry;
    }
    begin = end + 1;
  }
  if (others.empty()) {
    unsetenv(kPreload);
  } else {
    setenv(kPreload, others.c_str(), 1);
  }
}

}  // namespace

bool IsTritonServer() { return dlsym(RTLD_DEFAULT, "TRITONSERVER_ApiVersion") != nullptr; }

Limits ReadSettings() {
  Limits limits;
  std::string error;
  const char* text = std::getenv(kGuardVariable);
  if (text != nullptr && !ParseLimits(text, &limits, &error)) {
    Log('W', "The variable " + std::string(kGuardVariable) + " was not understood from here on: " + error);
  }
  unsetenv(kGuardVariable);
  RemoveFromPreload();
  const uint64_t half = MemoryOfThisMachine() / 2;
  if (limits.max_in_flight_bytes == 0) limits.max_in_flight_bytes = half;
  if (limits.max_input_bytes == 0) limits.max_input_bytes = limits.max_in_flight_bytes;
  return limits;
}

CorsOrigins ReadOrigins() {
  const char* text = std::getenv(kCorsVariable);
  const CorsOrigins origins(text == nullptr ? "" : text);
  unsetenv(kCorsVariable);
  return origins;
}

uint64_t EnlargeStacks(uint64_t bytes) {
  pthread_attr_t attributes;
  size_t now = 0;
  if (pthread_attr_init(&attributes) != 0) return 0;
  using GetDefault = int (*)(pthread_attr_t*);
  using SetDefault = int (*)(const pthread_attr_t*);
  // The functions are looked up by name, because a library that is built for older systems must not require them.
  const auto get = reinterpret_cast<GetDefault>(dlsym(RTLD_DEFAULT, "pthread_getattr_default_np"));
  const auto set = reinterpret_cast<SetDefault>(dlsym(RTLD_DEFAULT, "pthread_setattr_default_np"));
  if (get == nullptr || set == nullptr || get(&attributes) != 0) {
    pthread_attr_destroy(&attributes);
    return 0;
  }
  pthread_attr_getstacksize(&attributes, &now);
  bool counts_reserved = true;
  if (std::FILE* file = std::fopen("/proc/sys/vm/overcommit_memory", "re")) {
    counts_reserved = std::fgetc(file) == '2';
    std::fclose(file);
  }
  rlimit space{};
  const bool is_limited = getrlimit(RLIMIT_AS, &space) != 0 || space.rlim_cur != RLIM_INFINITY;
  if (bytes > now && !counts_reserved && !is_limited && pthread_attr_setstacksize(&attributes, bytes) == 0 &&
      set(&attributes) == 0) {
    now = bytes;
  }
  pthread_attr_destroy(&attributes);
  return now;
}

std::string PythonBackendPrefix(int argc, char** argv) {
  constexpr char kOption[] = "shm-region-prefix-name=";
  for (int i = 1; i < argc; ++i) {
    const char* found = std::strstr(argv[i], kOption);
    if (found != nullptr && found[sizeof(kOption) - 1] != '\0') return found + sizeof(kOption) - 1;
  }
  return "triton_python_backend_shm_region";
}

bool IsInProgram(const void* address) {
  static const Range program = [] {
    Range found;
    dl_iterate_phdr(FindProgram, &found);
    return found;
  }();
  const auto place = reinterpret_cast<uintptr_t>(address);
  return place >= program.begin && place < program.end;
}

void Log(char severity, const std::string& text) {
  timeval now{};
  gettimeofday(&now, nullptr);
  tm parts{};
  gmtime_r(&now.tv_sec, &parts);
  char head[64];
  std::snprintf(head, sizeof(head), "%c%02d%02d %02d:%02d:%02d.%06ld %d pytriton guard] ", severity, parts.tm_mon + 1,
                parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec, static_cast<long>(now.tv_usec), getpid());
  const std::string line = head + Printable(text) + "\n";
  // If even the log cannot be written, nothing more can be done.
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

}  // namespace pytriton::guard
