// Written by `python3 tools/dev.py reference` from
// guard.py, handover.py, outcomes.py and exec_shim.py in server/tritonserver. Change that.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pytriton::guard {

// Environment variable with the settings where `Triton` gets none: `name=value` with commas between them, or `off`.
constexpr char kGuardVariable[] = "PYTRITON_GUARD";
// Environment variable with the origins whose pages may read answers, blanks between them; `*` is any.
constexpr char kCorsVariable[] = "PYTRITON_GUARD_CORS";
// Environment variable for the guard: the descriptors of the channel and of the page.
constexpr char kHandoverVariable[] = "PYTRITON_GUARD_HANDOVER";
// Environment variable for the guard: the descriptor of the memory.
constexpr char kOutcomesVariable[] = "PYTRITON_GUARD_OUTCOMES";
// Environment variable for the guard: the descriptor of memory with what may not stand on a command line.
constexpr char kGuardSecretsVariable[] = "PYTRITON_GUARD_SECRETS";
// Name of the file with the guard, which is loaded into tritonserver before its own libraries.
constexpr char kGuardLibraryName[] = "libpytriton_guard.so";
constexpr int kRolePlace = 0;  // Where the server's role is in the page that it shares with its starter.
// Not 0 while the starter tries out what is in force: what is refused meanwhile is its own.
constexpr int kTriedPlace = 1;
constexpr int kCompletePlace = 2;  // Not 0 once the script has bound all of its models: no other is about to come.
constexpr int kEndingPlace = 3;  // Not 0 once the server is to end, and takes no more requests for inference.
// How many requests for inference there are in the server, a number of four bytes.
constexpr int kRequestsPlace = 4;
constexpr int kReachedPlace = 8;  // From here on a byte for each `Protection`, not 0 if it was reached.
// Models that have counts of their own; the first entry is that of requests without a model.
constexpr int kCountedModels = 1024;
constexpr int kCountedName = 248;  // Bytes of the name of such a model.
constexpr int kCountedOutcomes = 16;  // Places for outcomes in an entry, more than there are.
constexpr int kEntryReady = 2;  // The state of an entry whose name is written.

// The settings of the guard: what a request may ask of the server, and which parts are switched on.
struct Limits {
  // Largest body of an HTTP request, and largest size that a compressed request may grow to, in bytes. tritonserver
  // 2.51 itself takes no more than the default over HTTP.
  uint64_t max_request_bytes = 2147483647u;
  // Most bytes that the shapes of one request's inputs may ask for, over HTTP and gRPC, tensors in shared memory
  // included.
  uint64_t max_input_bytes = 0u;
  // Memory for the bodies of all HTTP requests that are being read or served, in bytes, and likewise for all
  // inputs; requests that need more are refused with UNAVAILABLE (503).
  uint64_t max_in_flight_bytes = 0u;
  uint64_t max_json_depth = 512u;  // How deep the JSON of a request may nest.
  // How long the first line and the header fields of an HTTP request may take to come, in seconds.
  uint64_t head_timeout_s = 60u;
  uint64_t thread_stack_bytes = 268435456u;  // Stack of each of the server's threads, in bytes.
  // Whether inference over gRPC is served by a front end of the guard's own, which callers cannot end by cancelling
  // calls.
  uint64_t grpc_front_end = 1u;
  // Whether a request to `generate` may have names that are no inputs, as Triton alone takes them, where the model
  // is one under `@model` that reads no parameters.
  uint64_t generate_extra_names = 0u;
  // Whether `GET /` and `GET /docs` show a page about the server: its models that are ready, their tensors, and how
  // they are called.
  uint64_t page = 1u;
  uint64_t refuse = 1u;  // Whether the guard refuses requests.
  // Whether the server can hand its sockets over to one that replaces it, as `Triton.replace_server` does.
  uint64_t handover = 1u;
  // Whether the guard speeds up the front end for HTTP, notices callers who leave, and serves inference over gRPC.
  uint64_t frontend = 1u;
};

struct LimitField {
  const char* name;
  uint64_t Limits::*value;
  uint64_t least;
};

constexpr LimitField kLimitFields[] = {
    {"max_request_bytes", &Limits::max_request_bytes, 1},
    {"max_input_bytes", &Limits::max_input_bytes, 0},
    {"max_in_flight_bytes", &Limits::max_in_flight_bytes, 0},
    {"max_json_depth", &Limits::max_json_depth, 1},
    {"head_timeout_s", &Limits::head_timeout_s, 1},
    {"thread_stack_bytes", &Limits::thread_stack_bytes, 0},
    {"grpc_front_end", &Limits::grpc_front_end, 0},
    {"generate_extra_names", &Limits::generate_extra_names, 0},
    {"page", &Limits::page, 0},
    {"refuse", &Limits::refuse, 0},
    {"handover", &Limits::handover, 0},
    {"frontend", &Limits::frontend, 0},
};

// The protocols by which requests come.
enum class Protocol : uint8_t {
  kHttp,
  kGrpc,
};
// How a request may end.
enum class Outcome : uint8_t {
  kOk,  // It was answered.
  kInvalid,  // The caller made a mistake.
  kQueueFull,  // The queue of the model was full.
  kQueueTimeout,  // It waited too long for its turn.
  kTimeLimit,  // The callable took longer than the model's execution timeout.
  kCancelled,  // The caller disconnected or cancelled it, or its deadline passed.
  kFailed,  // The callable raised, or what it returned is wrong.
  kWorkerLost,  // The worker ended while it was at it.
  kUnavailable,  // Nothing serves the model.
  kUnknown = 0xff,  // not yet known
};
// What one of two servers at the same sockets does.
enum Role : uint8_t {
  kStandingBy = 0,  // It accepts no connections. Those that it has are answered, and then closed.
  kServing = 1,  // It accepts connections.
  kLeft = 2,  // As `STANDING_BY`; and who asks over such a connection is told to ask again over another one.
};
// What the guard does.
enum class Protection : size_t {
  kHttpRequests,  // requests over HTTP are looked at before the server parses them
  kHttpResponses,  // the memory of HTTP requests is counted until they are answered, and statuses are set right
  kHttpCallers,  // callers over HTTP who leave are noticed
  kHttpThreads,  // HTTP connections are spread over the threads of the front end
  kHttpDeferrals,  // parts of answers over HTTP are not lost where the thread that sends them is behind
  kHttpEnds,  // what is known of an HTTP connection ends with it
  kCompressedBodies,  // compressed requests are looked at, and may not grow beyond all bounds
  kShapes,  // shapes of inputs that ask for too much memory are refused
  kRequestedOutputs,  // an output that is asked for twice is refused
  kClassification,  // the classification of texts divides by no zero
  kInputData,  // inputs with sizes that overflow are refused
  kRequestEnds,  // the memory of requests is counted until they end
  kSharedMemory,  // shared memory of Triton's Python backend cannot be registered
  kSharedFiles,  // one file cannot be registered as shared memory twice, nor end the server by getting shorter
  kCrashes,  // a crashed server ends at once
  kGrpcFrontEnd,  // callers over gRPC who cancel their calls do not end the server
  kGrpcCalls,  // calls over gRPC are read by the guard's own front end
  kGrpcConnections,  // callers over gRPC are told to ask the server that replaces this one
  kReplacement,  // the server can hand its sockets over to another one
  kInstances,  // the threads of models are known
  kModelDeletion,  // a model is deleted only when its threads have settled
  kCount
};

}  // namespace pytriton::guard
