// The start of the guard, before the program's `main`.
#include <unistd.h>

#include <algorithm>
#include <string>

#include "answers/questions.h"
#include "frontend/grpc_service.h"
#include "hooks.h"
#include "in_force.h"
#include "refuse/memory.h"
#include "refuse/secrets.h"
#include "refuse/shared_mappings.h"
#include "startup.h"
#include "workarounds/crash.h"
#include "workarounds/grpc_error_mode.h"
#include "workarounds/open_files.h"
#include "workarounds/orphans.h"
#include "workarounds/trace_flag.h"

namespace pytriton::guard {
namespace {

// In up to two lists on the stack, each piece of a body takes 16 bytes; the rest is for everything else.
constexpr uint64_t kStackBytesPerPiece = 64;

// Describes which parts are switched on, and the limits of requests.
std::string WhatIsOn(const Guard& guard, uint64_t stack) {
  const Limits& limits = guard.limits;
  std::string text = limits.refuse == 0 ? "refuse is off"
                                        : "requests of up to " + Bytes(limits.max_request_bytes) + ", inputs of up to " +
                                              Bytes(limits.max_input_bytes) + ", JSON " +
                                              std::to_string(limits.max_json_depth) + " levels deep, " +
                                              Bytes(limits.max_in_flight_bytes) + " in flight, stacks of " + Bytes(stack);
  if (limits.handover == 0) text += ", handover is off";
  if (limits.frontend == 0) text += ", frontend is off";
  return text;
}

__attribute__((constructor)) void Start(int argc, char** argv, char**) {
  if (!IsTritonServer()) return;
  FindAllNext();
  IsInProgram(nullptr);  // looks up and remembers where the program lies
  FindTritonFunctions();
  ReadSecrets(argc, argv);
  // This is never freed, because threads run until the process ends.
  Guard& guard = *new Guard;
  guard.limits = ReadSettings();
  guard.cors = ReadOrigins();
  guard.has_gpu = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
  guard.python_backend_prefix = PythonBackendPrefix(argc, argv);
  guard.listeners.Start(guard.limits.handover != 0);
  guard.outcomes.Start(HasModel);
  HideErrorMode();
  const uint64_t stack = EnlargeStacks(guard.limits.refuse == 0 ? 0 : guard.limits.thread_stack_bytes);
  guard.max_pieces = std::max<uint64_t>(stack, 1 << 20) / kStackBytesPerPiece;
  large_requests();
  if (!guard.connections.Reserve() || !PutInForce(&guard)) {
    Log('W', "There is no memory for the table of connections: requests are not guarded.");
    return;
  }
  KeepSpare();
  HandleCrashes();
  if (guard.listeners.has_starter()) EndWithStarter();
  // This comes before the crash handlers, because a fault that it cannot mend is a crash.
  if (guard.limits.refuse != 0) HandleSharedMemoryFaults();
  guard.makes_spans = MakesSpans(argc, argv);
  guard.hides_models = RestrictsModels(argc, argv);
  StartFrontEnd(guard, argc, argv);
  Log('I', "active " + std::to_string(kVersion) + ": " + WhatIsOn(guard, stack));
}

}  // namespace
}  // namespace pytriton::guard
