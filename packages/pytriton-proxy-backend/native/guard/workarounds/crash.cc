#include "crash.h"

#include <link.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace pytriton::guard {

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL};
constexpr const char* kNames[] = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"};
// If the crash report does not end, this alarm ends the process.
constexpr unsigned kLastWordsSeconds = 5;
constexpr size_t kMostModules = 256;
constexpr size_t kMostFrames = 16;
constexpr size_t kStackWords = 512;

struct Module {
  uintptr_t begin;
  uintptr_t end;
  uintptr_t base;
  char name[48];
};

// The list is written before a crash and read during one. Both may happen at once, so a crash uses the count that was
// published last.
Module g_modules[kMostModules];
std::atomic<size_t> g_count{0};
long g_process = 0;

int AddModule(dl_phdr_info* info, size_t, void* data) {
  auto* const count = static_cast<size_t*>(data);
  for (int i = 0; i < info->dlpi_phnum && *count < kMostModules; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD || (header.p_flags & PF_X) == 0) continue;
    Module& module = g_modules[(*count)++];
    module.base = info->dlpi_addr;
    module.begin = info->dlpi_addr + header.p_vaddr;
    module.end = module.begin + header.p_memsz;
    const char* name = info->dlpi_name;
    if (name == nullptr || name[0] == '\0') name = "tritonserver";
    if (const char* slash = std::strrchr(name, '/')) name = slash + 1;
    std::strncpy(module.name, name, sizeof(module.name) - 1);
  }
  return 0;
}

// A text of fixed size, because nothing here may allocate.
class Line {
 public:
  Line& operator<<(const char* text) {
    while (*text != '\0' && size_ < sizeof(text_)) text_[size_++] = *text++;
    return *this;
  }
  Line& Decimal(uint64_t value) {
    char digits[20];
    size_t count = 0;
    do {
      digits[count++] = static_cast<char>('0' + value % 10);
      value /= 10;
    } while (value > 0);
    while (count > 0 && size_ < sizeof(text_)) text_[size_++] = digits[--count];
    return *this;
  }
  Line& Hex(uint64_t value) {
    *this << "0x";
    bool is_begun = false;
    for (int shift = 60; shift >= 0; shift -= 4) {
      const unsigned digit = value >> shift & 15;
      is_begun = is_begun || digit != 0 || shift == 0;
      if (is_begun && size_ < sizeof(text_)) text_[size_++] = "0123456789abcdef"[digit];
    }
    return *this;
  }
  // If the log cannot be written, nothing more can be done.
  void Write() {
    *this << "\n";
    if (write(STDERR_FILENO, text_, size_) < 0) return;
  }

 private:
  char text_[1024];
  size_t size_ = 0;
};

// Adds a place in the code with its module. Returns false if it is in none.
bool AddPlace(Line* line, uintptr_t address) {
  const size_t count = g_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) {
    const Module& module = g_modules[i];
    if (address < module.begin || address >= module.end) continue;
    (*line << " " << module.name << "+").Hex(address - module.base);
    return true;
  }
  return false;
}

void OnCrash(int number, siginfo_t* info, void* given) {
  // Only one thread reports; others may crash at the same time, often for the same reason.
  static std::atomic<bool> is_begun{false};
  if (is_begun.exchange(true)) {
    for (;;) pause();
  }
  signal(SIGALRM, SIG_DFL);
  sigset_t alarm_alone;
  sigemptyset(&alarm_alone);
  sigaddset(&alarm_alone, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarm_alone, nullptr);
  alarm(kLastWordsSeconds);

  const char* name = "?";
  for (size_t i = 0; i < sizeof(kSignals) / sizeof(kSignals[0]); ++i) {
    if (kSignals[i] == number) name = kNames[i];
  }
  char thread[16] = "?";
  prctl(PR_GET_NAME, thread);
  Line first;
  const long process = syscall(SYS_getpid);
  first << "pytriton guard] " << (process == g_process ? "The server" : "A child of the server");
  (first << " crashed: signal ").Decimal(static_cast<uint64_t>(number));
  (first << " (" << name << ") in thread ").Decimal(static_cast<uint64_t>(syscall(SYS_gettid)));
  first << " (" << thread << ")";
  if (info->si_code > 0 && number != SIGABRT) (first << ", at address ").Hex(reinterpret_cast<uintptr_t>(info->si_addr));
  first.Write();

  const auto* const context = static_cast<const ucontext_t*>(given);
#if defined(__x86_64__)
  const auto code = static_cast<uintptr_t>(context->uc_mcontext.gregs[REG_RIP]);
  const auto stack = static_cast<uintptr_t>(context->uc_mcontext.gregs[REG_RSP]);
#else
  const auto code = static_cast<uintptr_t>(context->uc_mcontext.pc);
  const auto stack = static_cast<uintptr_t>(context->uc_mcontext.sp);
#endif
  Line second;
  second << "pytriton guard] Places in the code, of which some may be left from earlier calls:";
  AddPlace(&second, code);
  // The words of the stack that look like return addresses. They are read through the kernel, which reports an error
  // where the stack ends.
  uintptr_t words[kStackWords];
  struct {
    void* base;
    size_t size;
  } to = {words, sizeof(words)}, from = {reinterpret_cast<void*>(stack & ~uintptr_t{7}), sizeof(words)};
  const long size = syscall(SYS_process_vm_readv, process, &to, 1ul, &from, 1ul, 0ul);
  size_t frames = 0;
  for (long i = 0; i < size / static_cast<long>(sizeof(uintptr_t)) && frames < kMostFrames; ++i) {
    frames += AddPlace(&second, words[i]) ? 1 : 0;
  }
  second.Write();

  signal(number, SIG_DFL);
  sigset_t crash;
  sigemptyset(&crash);
  sigaddset(&crash, number);
  pthread_sigmask(SIG_UNBLOCK, &crash, nullptr);
  syscall(SYS_tgkill, process, syscall(SYS_gettid), number);
  _exit(128 + number);
}

}  // namespace

void RememberModules() {
  size_t count = 0;
  dl_iterate_phdr(AddModule, &count);
  g_count.store(count, std::memory_order_release);
}

bool IsCrash(int signal) {
  for (const int crash : kSignals) {
    if (crash == signal) return true;
  }
  return false;
}

void HandleCrashes() {
  RememberModules();
  g_process = getpid();
  struct sigaction action {};
  action.sa_sigaction = OnCrash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigfillset(&action.sa_mask);
  for (const int number : kSignals) {
    sigdelset(&action.sa_mask, number);
    sigaction(number, &action, nullptr);
  }
}

}  // namespace pytriton::guard
