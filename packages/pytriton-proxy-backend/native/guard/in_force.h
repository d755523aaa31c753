// What is in force in this process: the state that the parts of the guard share, and which of them are switched on.
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

// How long what is said of the models may be of before.
constexpr std::chrono::seconds kPagePause{1};

// The server, as long as it is there; who asks it anything but what it does by itself has the mutex, shared.
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
  bool hides_models = false;  // who may not ask for the inputs of a model is not told of them
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
  // Bytes of the bodies of large HTTP requests that are complete and not answered.
  std::atomic<uint64_t> awaiting{0};
  std::atomic<uint64_t> leaked{0};  // by compressed requests that failed
  std::atomic<uint64_t> pipelined{0};
  std::atomic<bool> has_shared_memory{false};
};

// What is in force in this process. It lies in a page that is empty in a child with copies of the memory: the kernel sees to
// that, and where it cannot, what the system runs after a fork. Nothing of it is ever freed: threads run until the end.
struct InForce {
  std::atomic<Guard*> guard;
  std::atomic<grpc::FrontEnd*> front_end;  // null where Triton's own does alone
  pid_t process;
};

// Null until the start, and for ever in programs that are no tritonserver.
inline std::atomic<InForce*> g_in_force{nullptr};

inline Guard* Active() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  return in_force == nullptr ? nullptr : in_force->guard.load(std::memory_order_acquire);
}

// The guard, where its part `refuse` is switched on.
inline Guard* Refusing() {
  Guard* const guard = Active();
  return guard != nullptr && guard->limits.refuse != 0 ? guard : nullptr;
}

inline grpc::FrontEnd* ActiveFrontEnd() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  return in_force == nullptr ? nullptr : in_force->front_end.load(std::memory_order_acquire);
}

// Puts the guard in force. False where the system has no memory.
bool PutInForce(Guard* guard);

// Whether this is a child that has the memory of this process itself (`vfork`), and is about to start another program.
inline bool IsInChild() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  // By the system call: old libraries remember the number.
  return in_force != nullptr && syscall(SYS_getpid) != in_force->process;
}

// Whether this thread reads HTTP connections. It also handles their requests, but not in the call that reads: what it
// reads in between belongs to other requests.
inline thread_local bool t_reads_http = false;

// The connection over HTTP that this thread has read, written, or stopped or begun to read last. The front end makes a request
// in the same call, so the next one that this thread makes is of that connection.
inline thread_local ConnectionName t_handled;

// Its descriptor; -1 where there is none, or it was closed.
inline int HandledConnection(Guard* guard) { return guard->connections.DescriptorOf(t_handled); }

}  // namespace pytriton::guard
