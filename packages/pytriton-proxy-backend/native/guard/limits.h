// The settings of the guard: what a request may ask of the server, and which parts are switched on. The defaults are far above what honest callers send.
#pragma once

#include <cstdint>
#include <string>

namespace pytriton::guard {

struct Limits {
  // Bytes of the body of an HTTP request, and of a request that was sent compressed. tritonserver 2.51 counts the
  // bytes of a body in 32 bits with a sign.
  uint64_t max_request_bytes = 2147483647;
  // Bytes that the shapes of a request's inputs ask for in all. 0: as max_in_flight_bytes.
  uint64_t max_input_bytes = 0;
  // Memory for all requests that are being read or served. 0: half of what this machine or container has.
  uint64_t max_in_flight_bytes = 0;
  // How deep the JSON of a request may nest.
  uint64_t max_json_depth = 512;
  // Stack of each of the server's threads, reserved and not used. 0: as the system has it.
  uint64_t thread_stack_bytes = 256ull << 20;
  // Whether inference over gRPC is served by the guard's own front end; 0 leaves it to Triton's.
  uint64_t grpc_front_end = 1;
  // Whether `generate` takes names that are no inputs for models that read no parameters; 0 refuses them.
  uint64_t generate_extra_names = 0;
  // Whether there is a page about the server at `/` and `/docs`.
  uint64_t page = 1;
  // The parts of the guard, each with a folder of its name; 0 switches it off.
  uint64_t refuse = 1;
  uint64_t handover = 1;
  uint64_t frontend = 1;
};

// Reads `name=value` pairs with commas between them, as in the variable PYTRITON_GUARD. False, with the reason, for a
// name or a value that is not known; what stands before it has been read then.
bool ParseLimits(const std::string& text, Limits* limits, std::string* error);

// The memory that this process may use, in bytes: that of its container, else of the machine.
uint64_t MemoryOfThisMachine();

// Bytes as a person reads them: "3.0 GiB".
std::string Bytes(uint64_t bytes);

}  // namespace pytriton::guard
