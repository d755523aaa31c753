// The state that the parts of the guard share in this process, and which of them are switched on.
#pragma once

#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <shared_mutex>
#include <string>

#include "answers/cors.h"
#include "answers/outcomes.h"
#include "answers/page.h"
#include "connections.h"
#include "frontend/http_callers.h"
#include "handover/listeners.h"
#include "limits.h"
#include "refuse/memory.h"
#include "triton.h"
#include "workarounds/log_file.h"
#include "workarounds/model_readiness.h"

namespace pytriton::grpc {
class FrontEnd;
}

namespace pytriton::guard {

// How old the page's information about models may be.
constexpr std::chrono::seconds kPagePause{1};

// The server, as long as it exists. Threads that call it for the guard hold the mutex as shared.
struct ServerReference {
  std::shared_mutex mutex;
  TRITONSERVER_Server* server = nullptr;
};

struct Guard {
  Limits limits;
  CorsOrigins cors;
  ServerReference server;
  uint64_t max_pieces = 0;
  bool has_gpu = false;
  bool makes_spans = false;
  bool hides_models = false;  // callers that may not ask for the inputs of a model must not be told of them
  std::string python_backend_prefix;
  Connections connections;
  HttpCallers callers{CancelRequest};
  ModelReadiness models;
  Listeners listeners;
  Outcomes outcomes;
  Outcomes uncounted;
  PageCache page{kPagePause};
  LogFile log_file;
  MemoryBudget bodies;
  MemoryBudget inputs;
  // Bytes in the bodies of large HTTP requests that are complete and not answered.
  std::atomic<uint64_t> awaiting{0};
  std::atomic<uint64_t> leaked{0};  // bytes that compressed requests leaked when they failed
  std::atomic<uint64_t> pipelined{0};
  std::atomic<bool> has_shared_memory{false};
};

// What is in force in this process. It lies in a page that is empty in a child with a copy of the memory: the kernel
// does that, or else a handler of fork. Nothing of it is ever freed, because threads run until the process ends.
struct InForce {
  std::atomic<Guard*> guard;
  std::atomic<grpc::FrontEnd*> front_end;  // null if only Triton's own front end serves gRPC
  pid_t process;
};

// Null until the start; stays null in programs that are not tritonserver.
inline std::atomic<InForce*> g_in_force{nullptr};

inline Guard* Active() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  return in_force == nullptr ? nullptr : in_force->guard.load(std::memory_order_acquire);
}

// Returns the guard if its part `refuse` is switched on.
inline Guard* Refusing() {
  Guard* const guard = Active();
  return guard != nullptr && guard->limits.refuse != 0 ? guard : nullptr;
}

inline grpc::FrontEnd* ActiveFrontEnd() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  return in_force == nullptr ? nullptr : in_force->front_end.load(std::memory_order_acquire);
}

// Puts the guard in force. Returns false if the system has no memory.
bool PutInForce(Guard* guard);

// Whether this is a child that shares the memory of this process (`vfork`), and is about to start another program.
inline bool IsInChild() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  // This makes the system call, because old libraries cache the number.
  return in_force != nullptr && syscall(SYS_getpid) != in_force->process;
}

// Whether this thread is reading an HTTP connection. It also handles requests, but not in the call that reads: bytes
// that it reads in between belong to other requests.
inline thread_local bool t_reads_http = false;

// The HTTP connection that this thread has last read, written, or stopped or begun to read. The front end makes a
// request in the same call, so the next request of this thread belongs to that connection.
inline thread_local ConnectionName t_handled;

// Its descriptor; -1 if there is none, or it was closed.
inline int HandledConnection(Guard* guard) { return guard->connections.DescriptorOf(t_handled); }

}  // namespace pytriton::guard
