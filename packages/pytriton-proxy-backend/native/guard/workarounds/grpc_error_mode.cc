#include "grpc_error_mode.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "../startup.h"

namespace pytriton::guard {
namespace {

// The header as a whole text of the program, with the zero bytes before and after it.
constexpr char kErrorMode[] = "\0triton_grpc_error";

// Finds the text; null if it is not there. It also reads between the constants, which sanitizers report as a fault.
__attribute__((no_sanitize("address"))) char* FindErrorMode(char* begin, const char* end) {
  for (char* place = begin; end - place >= static_cast<ptrdiff_t>(sizeof(kErrorMode)); ++place) {
    size_t same = 0;
    while (same < sizeof(kErrorMode) && place[same] == kErrorMode[same]) ++same;
    if (same == sizeof(kErrorMode)) return place;
  }
  return nullptr;
}

// Changes the first letter of the text, in a segment of constants, to a capital. gRPC has no capitals in names of
// headers, so the header is never found.
void HideErrorModeIn(char* begin, size_t size) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const char* const end = begin + size;
  while (char* found = FindErrorMode(begin, end)) {
    char* const letter = found + 1;
    char* const place = letter - reinterpret_cast<uintptr_t>(letter) % page;
    if (mprotect(place, page, PROT_READ | PROT_WRITE) != 0) {
      Log('W', "A stream over gRPC with the header triton_grpc_error: true can end this server, if its model fails");
      return;
    }
    *letter = 'T';
    mprotect(place, page, PROT_READ);
    begin = letter;
  }
}

int HideErrorModeInProgram(dl_phdr_info* info, size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD || header.p_flags != PF_R) continue;
    HideErrorModeIn(reinterpret_cast<char*>(info->dlpi_addr + header.p_vaddr), header.p_memsz);
  }
  return 1;  // the first is the program
}

}  // namespace

void HideErrorMode() { dl_iterate_phdr(HideErrorModeInProgram, nullptr); }

}  // namespace pytriton::guard
