// A library to be loaded into tritonserver before its own (LD_PRELOAD). It stands in front of a few functions that the
// server calls through the dynamic linker, and refuses what would end the server or take all its memory:
//
//   readv                       requests as they arrive on HTTP connections: see http_scan.h
//   accept4, accept, close,
//   writev                      to know which descriptors are such connections, and when a request is answered
//   ioctl                       to spread HTTP connections over the threads of the front end: see http_threads.h
//   syscall, epoll_ctl,
//   epoll_wait                  to save the front end most of its calls to epoll: see http_poll.h
//   inflate                     what compressed requests grow to, and the JSON in it
//   TRITONSERVER_Inference...   the shapes of inputs, for which the front ends take memory
//   TRITONSERVER_DataType...    a size by which the front ends divide
//   shm_open                    names that only Triton's Python backend may use
//   setpriority, pthread_create to know the threads of instances, which a model must not be deleted beside
//   sendmsg, recvmsg            requests over gRPC: who asks a server that is replaced is to ask the one that follows
//   bind, listen, shutdown      to hand the sockets that listen to the server that is to follow: see listeners.h
//
// In any other program it does nothing and hands the calls on.

#include <dlfcn.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "connections.h"
#include "instance_threads.h"
#include "listeners.h"
#include "shape_check.h"
#include "startup.h"

// The part of Triton's C API that is used here; the ABI only grows.
struct TRITONSERVER_BufferAttributes;
struct TRITONSERVER_Error;
struct TRITONSERVER_InferenceRequest;
struct TRITONSERVER_Server;

// The begin of zlib's z_stream, which has not changed since 1995.
struct z_stream_s {
  unsigned char* next_in;
  unsigned avail_in;
  unsigned long total_in;
  unsigned char* next_out;
  unsigned avail_out;
  unsigned long total_out;
};

namespace pytriton::guard {
namespace {

constexpr int kInvalidArgument = 3;  // TRITONSERVER_ERROR_INVALID_ARG
constexpr int kUnavailable = 4;      // TRITONSERVER_ERROR_UNAVAILABLE
constexpr int kStreamError = -2;     // Z_STREAM_ERROR

// Requests below this are not counted in the memory in flight: many of them are little, and most requests are such.
constexpr uint64_t kSmall = 64 * 1024;
// A stack holds 16 bytes for each piece of a body, in up to two lists, and all else.
constexpr uint64_t kStackBytesPerPiece = 64;
// A JSON element has at least two characters, a digit and a comma, and at most eight bytes as a tensor's element.
constexpr uint64_t kBytesPerJsonByte = 4;
// More than a process can address.
constexpr uint64_t kMostMemory = 1ull << 47;
// What is still sent after a refusal is read for so long, so that the caller gets to read the answer.
constexpr time_t kMaxDrainSeconds = 10;
constexpr uint64_t kMaxDrainBytes = 256ull << 20;

// The function that this library stands in front of.
template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

struct Guard {
  Limits limits;
  uint64_t max_pieces = 0;
  bool has_gpu = false;
  std::string python_backend_prefix;
  Connections connections;
  Listeners listeners;
  MemoryBudget bodies;
  MemoryBudget inputs;
  // Bytes of the bodies of large HTTP requests that are complete and not answered.
  std::atomic<uint64_t> awaiting{0};
  std::atomic<uint64_t> leaked{0};  // by compressed requests that failed
  std::atomic<uint64_t> pipelined{0};
  std::atomic<bool> has_shared_memory{false};
};

// Null until the start, and for ever in programs that are no tritonserver. Never freed: threads run until the end.
std::atomic<Guard*> g_guard{nullptr};

Guard* Active() { return g_guard.load(std::memory_order_acquire); }

// Whether this thread reads HTTP connections. It also handles their requests, but not in the call that reads: what it
// reads in between belongs to other requests.
thread_local bool t_reads_http = false;

// Of the front end whose connections this thread accepts; null in other threads. Kept, as those threads are.
thread_local HttpThreads* t_http_threads = nullptr;

// The epoll at which this thread has waited last; and what keeps the connections of one, null before the first.
thread_local int t_epoll = -1;
thread_local HttpPoll* t_http_poll = nullptr;

// What this thread decompresses, until a request is made of it.
struct Decompression {
  const z_stream_s* stream = nullptr;
  JsonScan json;
  uint64_t bytes = 0;    // that came out
  uint64_t charged = 0;  // of the memory in flight
};
thread_local Decompression t_decompression;

// The request that this thread makes, and the bytes of its inputs so far.
struct RequestInputs {
  void Begin(const TRITONSERVER_InferenceRequest* made) {
    request = made;
    bytes = counted = 0;
    outputs.clear();
  }

  const TRITONSERVER_InferenceRequest* request = nullptr;
  uint64_t bytes = 0;
  uint64_t counted = 0;  // of these, in the memory in flight
  std::unordered_set<std::string> outputs;  // those that are asked for
};
thread_local RequestInputs t_inputs;

// Refusals come in bursts; a line each would be an attack on the log.
void LogRefusal(const std::string& text) {
  static std::atomic<time_t> last{0};
  static std::atomic<uint64_t> left_out{0};
  const time_t now = time(nullptr);
  time_t before = last.load();
  if (before == now || !last.compare_exchange_strong(before, now)) {
    left_out.fetch_add(1);
    return;
  }
  const uint64_t more = left_out.exchange(0);
  Log('W', "Refused a request: " + text + (more > 0 ? " (and " + std::to_string(more) + " others before it)" : ""));
}

// Triton's own kind of error, for its callers.
TRITONSERVER_Error* Error(int code, const std::string& text) {
  static const auto make = reinterpret_cast<TRITONSERVER_Error* (*)(int, const char*)>(
      dlsym(RTLD_DEFAULT, "TRITONSERVER_ErrorNew"));
  LogRefusal(text);
  return make(code, text.c_str());
}

// --- HTTP connections ----------------------------------------------------------------------------------------------

void ReleaseMemory(Guard* guard, Connection* connection) {
  guard->bodies.Release(connection->charged);
  connection->charged = 0;
}

// Counts what the request has come to need. False if all in flight need too much.
bool ReserveMemory(Guard* guard, Connection* connection) {
  const uint64_t needed = connection->scan.memory();
  if (needed <= kSmall || needed <= connection->charged) return true;
  if (!guard->bodies.TryReserve(needed - connection->charged, guard->limits.max_in_flight_bytes)) return false;
  connection->charged = needed;
  return true;
}

// Counts a complete request among those that wait for their response.
void Await(Guard* guard, Connection* connection) {
  connection->awaits_response = true;
  const uint64_t sent = connection->scan.body_bytes();
  if (sent <= kSmall / kBytesPerJsonByte) return;
  guard->awaiting.fetch_add(sent, std::memory_order_relaxed);
  connection->awaiting += sent;
}

void StopAwaiting(Guard* guard, Connection* connection) {
  connection->awaits_response = false;
  guard->awaiting.fetch_sub(connection->awaiting, std::memory_order_relaxed);
  connection->awaiting = 0;
}

const char* ReasonPhrase(int status) {
  switch (status) {
    case 408:
      return "Request Timeout";
    case 413:
      return "Payload Too Large";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    default:
      return "Bad Request";
  }
}

// Answers in place of the server, which never sees the request.
void SendErrorResponse(int fd, const Refusal& refusal) {
  const std::string body = "{\"error\":\"" + refusal.text + "\"}";
  const std::string answer = "HTTP/1.1 " + std::to_string(refusal.status) + " " + ReasonPhrase(refusal.status) +
                             "\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: " +
                             std::to_string(body.size()) + "\r\n\r\n" + body;
  // A caller that reads nothing, or has gone, is not waited for.
  if (send(fd, answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) shutdown(fd, SHUT_WR);
}

// Reads and forgets what a refused caller still sends: the answer would be lost if the connection was closed on it.
ssize_t DrainRequest(Connection* connection, int fd) {
  char scratch[64 * 1024];
  for (int i = 0; i < 16; ++i) {
    if (connection->drained_bytes > kMaxDrainBytes || time(nullptr) - connection->refused_at > kMaxDrainSeconds) {
      return 0;
    }
    const ssize_t count = recv(fd, scratch, sizeof(scratch), MSG_DONTWAIT);
    if (count <= 0) return count;
    connection->drained_bytes += static_cast<uint64_t>(count);
  }
  errno = EAGAIN;
  return -1;
}

ssize_t Refuse(Connection* connection, int fd, const Refusal& refusal, size_t before) {
  LogRefusal(refusal.text);
  const bool is_behind_another = connection->awaits_response || before > 0;
  connection->is_refused = true;
  connection->refused_at = time(nullptr);
  // What has come of it stays charged until the connection is closed: so long the server keeps it.
  if (is_behind_another) {
    // An answer now would be taken for that of the request in front.
    shutdown(fd, SHUT_RD);
    if (before > 0) return static_cast<ssize_t>(before);
  } else {
    SendErrorResponse(fd, refusal);
  }
  errno = EAGAIN;
  return -1;
}

// Whether a listener's connections are left to the server that follows this one.
bool IsHandedOver(Guard* guard, int listener) {
  return guard != nullptr && !guard->listeners.accepts() && guard->listeners.Has(listener);
}

// Whether a connection is one of the front ends; those of workers come through the file system, and are none of ours.
bool IsInternet(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && (domain == AF_INET || domain == AF_INET6);
}

Interest* FindInterest(int fd) {
  Guard* guard = Active();
  return guard == nullptr ? nullptr : guard->connections.FindInterest(fd);
}

void ForgetInterest(int fd) {
  Interest* interest = FindInterest(fd);
  HttpPoll* poll = interest == nullptr ? nullptr : interest->poll.load(std::memory_order_acquire);
  if (poll != nullptr) poll->Forget(interest, fd);
}

int NextEpollControl(int epoll, int operation, int fd, epoll_event* event) {
  static const auto next = Next<decltype(&epoll_ctl)>("epoll_ctl");
  return next(epoll, operation, fd, event);
}

int NextEpollWait(int epoll, epoll_event* events, int most, int timeout_ms) {
  static const auto next = Next<decltype(&epoll_wait)>("epoll_wait");
  return next(epoll, events, most, timeout_ms);
}

int ControlEpoll(int epoll, int operation, int fd, epoll_event* event) {
  Interest* interest = FindInterest(fd);
  HttpPoll* poll = interest == nullptr ? nullptr : interest->poll.load(std::memory_order_acquire);
  if (poll == nullptr && interest != nullptr && t_epoll == epoll && HttpPoll::CanKeep(operation, fd, event)) {
    if (t_http_poll == nullptr) t_http_poll = new HttpPoll(epoll, {NextEpollControl, NextEpollWait, FindInterest});
    poll = t_http_poll;
  }
  if (poll == nullptr || poll->epoll() != epoll) return NextEpollControl(epoll, operation, fd, event);
  return poll->Control(interest, operation, fd, event, poll == t_http_poll);
}

int WaitAtEpoll(int epoll, epoll_event* events, int most, int timeout_ms) {
  t_epoll = epoll;
  HttpPoll* const poll = t_http_poll;
  if (poll == nullptr || poll->epoll() != epoll) return NextEpollWait(epoll, events, most, timeout_ms);
  return poll->Wait(events, most, timeout_ms);
}

template <typename Call>
int Accept(int listener, Call next) {
  Guard* guard = Active();
  if (IsHandedOver(guard, listener)) {
    errno = EAGAIN;
    return -1;
  }
  const int fd = next();
  if (guard != nullptr && fd >= 0 && IsInternet(fd)) {
    guard->connections.OnAccept(fd);
    ForgetInterest(fd);
    if (t_http_threads == nullptr) t_http_threads = new HttpThreads(std::thread::hardware_concurrency());
    t_http_threads->OnAccept(fd);
  }
  return fd;
}

std::mutex& WritingOf(int fd) {
  static std::array<std::mutex, 64> mutexes;
  return mutexes[static_cast<size_t>(fd) % mutexes.size()];
}

// Sends GOAWAY ahead of what is sent next, once. False where the system takes no more for now.
bool SayGoodbye(Connection* connection, int fd, uint32_t last_stream) {
  const auto frame = GoAway(last_stream);
  size_t& done = connection->goodbye_bytes;
  if (done == frame.size() || (done == 0 && !connection->sent.is_between_frames())) return true;
  const ssize_t count = send(fd, frame.data() + done, frame.size() - done, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (count > 0) done += static_cast<size_t>(count);
  return done == 0 || done == frame.size();
}

// Looks at what was read. Returns how much of it the server is to see.
ssize_t Inspect(Guard* guard, Connection* connection, int fd, const iovec* parts, int count, size_t size) {
  t_reads_http = true;
  HttpScan& scan = connection->scan;
  size_t seen = 0;
  size_t request_begin = 0;  // of the request that is being read, in these bytes
  for (int i = 0; i < count && seen < size; ++i) {
    auto* data = static_cast<char*>(parts[i].iov_base);
    size_t left = std::min(parts[i].iov_len, size - seen);
    while (left > 0) {
      if (scan.complete()) {
        if (connection->awaits_response != connection->is_pipelined) {
          connection->is_pipelined = connection->awaits_response;
          guard->pipelined.fetch_add(connection->is_pipelined ? 1 : -1);
        }
        if (!connection->awaits_response) ReleaseMemory(guard, connection);
        scan.Begin();
        // Whose answer closes the connection: the next one is for the server that follows.
        scan.set_last(!guard->listeners.accepts());
        request_begin = seen;
      }
      const size_t used = scan.Feed(data, left, guard->limits, guard->max_pieces);
      Refusal refusal = scan.refusal();
      if (refusal.status == 0 && !ReserveMemory(guard, connection)) {
        refusal = {503, "the requests in flight need more than " + Bytes(guard->limits.max_in_flight_bytes) +
                            ", the limit max_in_flight_bytes of the guard; try again later"};
      }
      if (refusal.status == 0 && scan.is_compressed() && guard->leaked.load() > guard->limits.max_in_flight_bytes / 4) {
        refusal = {503, "compressed requests are not taken any more until a restart: those that failed have left " +
                            Bytes(guard->leaked.load()) + " in the server, which it never gives back"};
      }
      if (refusal.status != 0) return Refuse(connection, fd, refusal, request_begin);
      if (scan.complete()) Await(guard, connection);
      data += used;
      left -= used;
      seen += used;
    }
  }
  // The server's parser (libevhtp 1.2.18) takes the byte behind what it was given, which is left from something else,
  // into a path that is not complete: it would then see another path than is seen here.
  if (scan.is_inside_target()) {
    // It reads 4 KiB at most at a time, so it may be the line that is too long.
    const int status = seen - request_begin > 2048 ? 431 : 400;
    const char* const text = "the first line of the request came in pieces; send it at once, in less than 4.0 KiB";
    return Refuse(connection, fd, {status, text}, request_begin);
  }
  return static_cast<ssize_t>(size);
}

void OnResponse(Guard* guard, Connection* connection, std::string_view begin) {
  if (!connection->awaits_response) return;
  // "HTTP/1.0 200 OK", or "HTTP/1.1 100 Continue" and an empty line in front of it, or alone.
  constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  constexpr size_t kStatus = 9;
  if (begin.size() > kStatus && begin[kStatus] == '1') begin.remove_prefix(std::min(begin.size(), kContinue.size()));
  if (begin.empty()) return;
  StopAwaiting(guard, connection);
  if (connection->scan.complete()) ReleaseMemory(guard, connection);
}

void OnClose(Guard* guard, Connection* connection) {
  ReleaseMemory(guard, connection);
  StopAwaiting(guard, connection);
  if (connection->is_pipelined) guard->pipelined.fetch_sub(1);
  connection->is_pipelined = false;
}

// --- the shapes of inputs ------------------------------------------------------------------------------------------

// The bytes of the inputs of large requests, by request, until it is deleted.
class LargeRequests {
 public:
  void Add(const void* request, uint64_t bytes) {
    Shard& shard = ShardOf(request);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    shard.bytes[request] += bytes;
    count_.fetch_add(1, std::memory_order_relaxed);
  }

  // Returns the bytes of a request, and forgets it.
  uint64_t Remove(const void* request) {
    // Added before the request was handed to anybody who could delete it.
    if (count_.load(std::memory_order_relaxed) == 0) return 0;
    Shard& shard = ShardOf(request);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    const auto found = shard.bytes.find(request);
    if (found == shard.bytes.end()) return 0;
    const uint64_t bytes = found->second;
    shard.bytes.erase(found);
    return bytes;
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<const void*, uint64_t> bytes;
  };
  Shard& ShardOf(const void* request) { return shards_[(reinterpret_cast<uintptr_t>(request) >> 6) % shards_.size()]; }

  std::array<Shard, 16> shards_;
  std::atomic<uint64_t> count_{0};  // of all that were ever added
};

LargeRequests& large_requests() {
  static auto* const large = new LargeRequests;  // never freed: threads run until the end
  return *large;
}

// Triton up to 2.68 keeps for ever what came out of a compressed request that then fails. What this thread has
// decompressed last, and made no request of, is such.
void CountLeak(Guard* guard) {
  guard->leaked.fetch_add(t_decompression.bytes);
  guard->inputs.Release(t_decompression.charged);
}

// Says what is wrong with one more input of a request; empty if nothing is.
std::string CheckInput(Guard* guard, const TRITONSERVER_InferenceRequest* request, const char* name, int data_type,
                       const int64_t* shape, uint64_t dims_count, int* code) {
  *code = kInvalidArgument;
  std::string error;
  uint64_t bytes = 0;
  if (!BytesOfShape(name, data_type, shape, dims_count, &bytes, &error)) return error;
  if (t_inputs.request != request) t_inputs.Begin(request);
  const auto what = [&] {
    return "input '" + NameText(name) + "' has the shape " + ShapeText(shape, dims_count) + ", with which the request's "
           "inputs have " + Bytes(t_inputs.bytes);
  };
  if (__builtin_add_overflow(t_inputs.bytes, bytes, &t_inputs.bytes)) t_inputs.bytes = UINT64_MAX;
  if (t_inputs.bytes > guard->limits.max_input_bytes) {
    return what() + ", more than " + Bytes(guard->limits.max_input_bytes) + ", the limit max_input_bytes of the guard";
  }
  if (t_inputs.bytes <= kSmall) return "";
  // The front end takes the memory for a tensor in JSON before it looks whether the elements are there. Tensors in
  // shared memory are not in the request. Which of the requests that wait for their response this is cannot be told.
  if (t_reads_http && guard->pipelined.load(std::memory_order_relaxed) == 0 && !guard->has_gpu &&
      !guard->has_shared_memory.load(std::memory_order_relaxed)) {
    const uint64_t sent = guard->awaiting.load(std::memory_order_relaxed) + t_decompression.bytes;
    if (t_inputs.bytes / kBytesPerJsonByte > sent) return what() + ", and no request in flight has so many";
  }
  const uint64_t more = t_inputs.bytes - t_inputs.counted;
  if (!guard->inputs.TryReserve(more, guard->limits.max_in_flight_bytes)) {
    *code = kUnavailable;
    return what() + ", and with all requests in flight more than " + Bytes(guard->limits.max_in_flight_bytes) +
           ", the limit max_in_flight_bytes of the guard; try again later";
  }
  large_requests().Add(request, more);
  t_inputs.counted = t_inputs.bytes;
  return "";
}

// --- start ---------------------------------------------------------------------------------------------------------

__attribute__((constructor)) void Start(int argc, char** argv, char**) {
  if (!IsTritonServer()) return;
  ReadSecrets(argc, argv);
  // Never freed: threads run until the end.
  Guard& guard = *new Guard;
  guard.limits = ReadSettings();
  guard.has_gpu = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
  guard.python_backend_prefix = PythonBackendPrefix(argc, argv);
  guard.listeners.Start();
  HideErrorMode();
  const uint64_t stack = EnlargeStacks(guard.limits.thread_stack_bytes);
  guard.max_pieces = std::max<uint64_t>(stack, 1 << 20) / kStackBytesPerPiece;
  if (!guard.connections.Reserve()) {
    Log('W', "There is no memory for the table of connections: requests are not guarded.");
    return;
  }
  large_requests();
  g_guard.store(&guard, std::memory_order_release);
  Log('I', "active " + std::to_string(kVersion) + ": requests of up to " + Bytes(guard.limits.max_request_bytes) +
               ", inputs of up to " + Bytes(guard.limits.max_input_bytes) + ", JSON " +
               std::to_string(guard.limits.max_json_depth) + " levels deep, " +
               Bytes(guard.limits.max_in_flight_bytes) + " in flight, stacks of " + Bytes(stack));
}

// --- deletion of models ----------------------------------------------------------------------------------------------

struct Thread {
  void* (*run)(void*);
  void* argument;
};

void* RunDeletion(void* given) {
  const std::unique_ptr<Thread> thread(static_cast<Thread*>(given));
  WaitForInstanceThreads();
  return thread->run(thread->argument);
}

bool IsStandardLibrary(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 && info.dli_fname != nullptr && std::strstr(info.dli_fname, "libstdc++") != nullptr;
}

}  // namespace
}  // namespace pytriton::guard

// --- the functions that it stands in front of ----------------------------------------------------------------------

using namespace pytriton::guard;

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT int accept4(int listener, sockaddr* address, socklen_t* length, int flags) {
  static const auto next = Next<decltype(&accept4)>("accept4");
  return Accept(listener, [&] { return next(listener, address, length, flags); });
}

EXPORT int accept(int listener, sockaddr* address, socklen_t* length) {
  static const auto next = Next<decltype(&accept)>("accept");
  return Accept(listener, [&] { return next(listener, address, length); });
}

EXPORT int bind(int fd, const sockaddr* address, socklen_t length) noexcept {
  static const auto next = Next<decltype(&bind)>("bind");
  Guard* guard = Active();
  if (guard != nullptr && guard->listeners.Adopt(fd, address, length)) return 0;
  return next(fd, address, length);
}

EXPORT int listen(int fd, int backlog) noexcept {
  static const auto next = Next<decltype(&listen)>("listen");
  const int result = next(fd, backlog);
  Guard* guard = Active();
  if (guard != nullptr && result == 0) guard->listeners.OnListen(fd);
  return result;
}

// The front end for gRPC ends its listener so, which the server that follows may have as well.
EXPORT int shutdown(int fd, int how) noexcept {
  static const auto next = Next<decltype(&shutdown)>("shutdown");
  Guard* guard = Active();
  return guard != nullptr && !guard->listeners.accepts() && guard->listeners.Has(fd) ? 0 : next(fd, how);
}

EXPORT int close(int fd) {
  static const auto next = Next<decltype(&close)>("close");
  Guard* guard = Active();
  if (guard != nullptr && guard->listeners.Has(fd)) {
    // Copies that a forked child of the starter may hold are to listen no longer than this server.
    shutdown(fd, SHUT_RDWR);
    guard->listeners.OnClose(fd);
  }
  ForgetInterest(fd);
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Remove(fd);
  if (connection != nullptr) OnClose(guard, connection);
  return next(fd);
}

EXPORT int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  return ControlEpoll(epoll, operation, fd, event);
}

EXPORT int epoll_wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  return WaitAtEpoll(epoll, events, most, timeout_ms);
}

// The server has functions for epoll of its own (libevent 2.1.12), which call this one.
EXPORT long syscall(long number, ...) noexcept {
  static const auto next = Next<long (*)(long, ...)>("syscall");
  // As many as there can be: what was not given is not looked at.
  std::array<long, 6> given{};
  va_list arguments;
  va_start(arguments, number);
  for (long& argument : given) argument = va_arg(arguments, long);
  va_end(arguments);
#ifdef SYS_epoll_wait
  const auto integer = [&given](size_t i) { return static_cast<int>(given[i]); };
  const auto events = [&given](size_t i) { return reinterpret_cast<epoll_event*>(given[i]); };
  if (number == SYS_epoll_ctl) return ControlEpoll(integer(0), integer(1), integer(2), events(3));
  if (number == SYS_epoll_wait) return WaitAtEpoll(integer(0), events(1), integer(2), integer(3));
#endif
  return next(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

EXPORT int ioctl(int fd, unsigned long request, ...) noexcept {
  static const auto next = Next<int (*)(int, unsigned long, ...)>("ioctl");
  va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  if (request == FIONREAD && t_http_threads != nullptr && t_http_threads->connection() >= 0) {
    const int connection = t_http_threads->connection();
    const auto answer = t_http_threads->Ask(fd);
    if (answer) {
      if (answer->chosen != nullptr) Active()->connections.Assign(connection, answer->chosen);
      *static_cast<int*>(argument) = answer->bytes;
      return 0;
    }
  }
  return next(fd, request, argument);
}

EXPORT ssize_t readv(int fd, const iovec* parts, int count) {
  static const auto next = Next<decltype(&readv)>("readv");
  Guard* guard = Active();
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Find(fd);
  if (connection == nullptr) return next(fd, parts, count);
  if (connection->is_refused) return DrainRequest(connection, fd);
  const bool is_idle = !connection->awaits_response && (connection->scan.complete() || !connection->scan.started());
  const ssize_t size = next(fd, parts, count);
  if (size > 0 && is_idle && guard->listeners.has_left()) {
    return Refuse(connection, fd, {408, "the server was replaced; ask again over another connection"}, 0);
  }
  return size <= 0 ? size : Inspect(guard, connection, fd, parts, count, static_cast<size_t>(size));
}

EXPORT ssize_t writev(int fd, const iovec* parts, int count) {
  static const auto next = Next<decltype(&writev)>("writev");
  const ssize_t size = next(fd, parts, count);
  Guard* guard = Active();
  Connection* connection = guard == nullptr || size <= 0 ? nullptr : guard->connections.FindKnown(fd);
  if (connection != nullptr) {
    OnResponse(guard, connection, {static_cast<const char*>(parts[0].iov_base), parts[0].iov_len});
  }
  return size;
}

EXPORT ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static const auto next = Next<decltype(&sendmsg)>("sendmsg");
  Guard* guard = Active();
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Find(fd);
  if (connection == nullptr) return next(fd, message, flags);
  const std::lock_guard<std::mutex> lock(WritingOf(fd));
  if (!guard->listeners.accepts() && !SayGoodbye(connection, fd, kAnyStream)) {
    errno = EAGAIN;
    return -1;
  }
  const ssize_t size = next(fd, message, flags);
  if (size > 0) connection->sent.Pass(message->msg_iov, message->msg_iovlen, static_cast<size_t>(size));
  return size;
}

EXPORT ssize_t recvmsg(int fd, msghdr* message, int flags) {
  static const auto next = Next<decltype(&recvmsg)>("recvmsg");
  Guard* guard = Active();
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Find(fd);
  const ssize_t size = next(fd, message, flags);
  if (connection == nullptr || size <= 0) return size;
  const uint32_t last_stream = connection->received.last_stream();
  connection->received.Pass(message->msg_iov, message->msg_iovlen, static_cast<size_t>(size));
  if (!guard->listeners.has_left() || connection->received.last_stream() == last_stream) return size;
  const std::lock_guard<std::mutex> lock(WritingOf(fd));
  if (connection->sent.is_between_frames()) {
    // The request has not been served, so its caller sends it again, over another connection.
    connection->goodbye_bytes = 0;
    SayGoodbye(connection, fd, last_stream);
    return 0;
  }
  return size;
}

EXPORT int inflate(z_stream_s* stream, int flush) {
  static const auto next = Next<decltype(&inflate)>("inflate");
  if (next == nullptr) return kStreamError;
  Guard* guard = Active();
  if (guard == nullptr || !IsInProgram(__builtin_return_address(0))) return next(stream, flush);
  const unsigned long before = stream->total_out;
  const auto* out = reinterpret_cast<const char*>(stream->next_out);
  const int result = next(stream, flush);
  if (stream->total_out > guard->limits.max_request_bytes) {
    LogRefusal("a compressed message has more than " + std::to_string(guard->limits.max_request_bytes) +
               " bytes, the limit max_request_bytes of the guard");
    return kStreamError;
  }
  // The front end for gRPC decompresses in threads of its own, and gives the memory back.
  if (!t_reads_http) return result;
  if (before == 0 || t_decompression.stream != stream) {
    CountLeak(guard);
    t_decompression = {stream, {}, 0, 0};
  }
  JsonScan& json = t_decompression.json;
  t_decompression.bytes = stream->total_out;
  std::string problem;
  if (!json.Feed(out, static_cast<size_t>(stream->total_out - before), guard->limits.max_json_depth, &problem) ||
      json.MayOverflow(stream->total_out)) {
    LogRefusal(problem.empty() ? "a compressed request has more values than the server can count" : problem);
    return kStreamError;
  }
  const uint64_t needed = stream->total_out + json.values() * kBytesPerJsonValue;
  if (needed > kSmall && needed > t_decompression.charged) {
    if (!guard->inputs.TryReserve(needed - t_decompression.charged, guard->limits.max_in_flight_bytes)) {
      LogRefusal("a compressed request needs more memory than max_in_flight_bytes of the guard leaves");
      return kStreamError;
    }
    t_decompression.charged = needed;
  }
  return result;
}

// What was decompressed belongs to this request from now on.
EXPORT TRITONSERVER_Error* TRITONSERVER_ServerInferAsync(TRITONSERVER_Server* server,
                                                         TRITONSERVER_InferenceRequest* request, void* trace) {
  static const auto next = Next<decltype(&TRITONSERVER_ServerInferAsync)>("TRITONSERVER_ServerInferAsync");
  Guard* guard = Active();
  const uint64_t charged = std::exchange(t_decompression.charged, 0);
  const uint64_t bytes = std::exchange(t_decompression.bytes, 0);
  // Before the call: the request may be gone after it.
  if (charged > 0) large_requests().Add(request, charged);
  TRITONSERVER_Error* const error = next(server, request, trace);
  if (bytes > 0 && error != nullptr) guard->leaked.fetch_add(bytes);
  return error;
}

EXPORT int shm_open(const char* name, int flags, mode_t mode) {
  static const auto next = Next<decltype(&shm_open)>("shm_open");
  Guard* guard = Active();
  if (guard != nullptr && IsInProgram(__builtin_return_address(0))) {
    if (name != nullptr && std::strstr(name, guard->python_backend_prefix.c_str()) != nullptr) {
      LogRefusal("shared memory of the Python backend, " + NameText(name) + ", is not for callers");
      errno = EACCES;
      return -1;
    }
    guard->has_shared_memory.store(true, std::memory_order_relaxed);
  }
  if (next == nullptr) {
    errno = ENOSYS;
    return -1;
  }
  return next(name, flags, mode);
}

// The first that the thread of an instance does.
EXPORT int setpriority(__priority_which_t which, id_t who, int priority) {
  static const auto next = Next<int (*)(__priority_which_t, id_t, int)>("setpriority");
  if (Active() != nullptr && which == PRIO_PROCESS && who == static_cast<id_t>(syscall(SYS_gettid))) {
    AddInstanceThread();
  }
  return next(which, who, priority);
}

EXPORT int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static const auto next = Next<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  if (next == nullptr) return EAGAIN;
  if (Active() == nullptr || argument == nullptr || !IsStandardLibrary(__builtin_return_address(0)) ||
      !DeletesModel(argument)) {
    return next(thread, attributes, run, argument);
  }
  auto deletion = std::make_unique<Thread>(Thread{run, argument});
  const int error = next(thread, attributes, RunDeletion, deletion.get());
  if (error == 0) deletion.release();
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestNew(TRITONSERVER_InferenceRequest** request,
                                                            TRITONSERVER_Server* server, const char* model,
                                                            int64_t version) {
  static const auto next = Next<decltype(&TRITONSERVER_InferenceRequestNew)>("TRITONSERVER_InferenceRequestNew");
  TRITONSERVER_Error* const error = next(request, server, model, version);
  t_inputs.Begin(error == nullptr ? *request : nullptr);
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest* request) {
  static const auto next = Next<decltype(&TRITONSERVER_InferenceRequestDelete)>("TRITONSERVER_InferenceRequestDelete");
  Guard* guard = Active();
  if (guard != nullptr) guard->inputs.Release(large_requests().Remove(request));
  if (t_inputs.request == request) t_inputs.Begin(nullptr);
  return next(request);
}

// A classification of texts divides by it in servers up to 2.58.
EXPORT uint32_t TRITONSERVER_DataTypeByteSize(int data_type) {
  static const auto next = Next<decltype(&TRITONSERVER_DataTypeByteSize)>("TRITONSERVER_DataTypeByteSize");
  const uint32_t size = next(data_type);
  return size == 0 && data_type == kTypeBytes && Active() != nullptr && IsInProgram(__builtin_return_address(0)) ? 1
                                                                                                               : size;
}

// Each name once: the server leaks a little for every further time.
EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddRequestedOutput(TRITONSERVER_InferenceRequest* request,
                                                                           const char* name) {
  static const auto next =
      Next<decltype(&TRITONSERVER_InferenceRequestAddRequestedOutput)>("TRITONSERVER_InferenceRequestAddRequestedOutput");
  if (Active() != nullptr && name != nullptr) {
    if (t_inputs.request != request) t_inputs.Begin(request);
    if (!t_inputs.outputs.insert(name).second) {
      return Error(kInvalidArgument, "output '" + NameText(name) + "' is asked for more than once");
    }
  }
  return next(request, name);
}

// The sum of offset and size of a place in shared memory may have overflowed.
EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputData(TRITONSERVER_InferenceRequest* request,
                                                                        const char* name, const void* base,
                                                                        size_t size, int memory_type,
                                                                        int64_t memory_type_id) {
  static const auto next =
      Next<decltype(&TRITONSERVER_InferenceRequestAppendInputData)>("TRITONSERVER_InferenceRequestAppendInputData");
  if (Active() != nullptr && size > kMostMemory) {
    return Error(kInvalidArgument, "input '" + NameText(name) + "' is said to have " + Bytes(size));
  }
  return next(request, name, base, size, memory_type, memory_type_id);
}

// As above, for what comes over gRPC.
EXPORT TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetByteSize(TRITONSERVER_BufferAttributes* attributes,
                                                                    size_t size) {
  static const auto next =
      Next<decltype(&TRITONSERVER_BufferAttributesSetByteSize)>("TRITONSERVER_BufferAttributesSetByteSize");
  if (Active() != nullptr && size > kMostMemory) {
    return Error(kInvalidArgument, "a tensor is said to have " + Bytes(size));
  }
  return next(attributes, size);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddInput(TRITONSERVER_InferenceRequest* request,
                                                                 const char* name, int data_type, const int64_t* shape,
                                                                 uint64_t dims_count) {
  static const auto next =
      Next<decltype(&TRITONSERVER_InferenceRequestAddInput)>("TRITONSERVER_InferenceRequestAddInput");
  Guard* guard = Active();
  if (guard != nullptr) {
    int code = 0;
    const std::string problem = CheckInput(guard, request, name, data_type, shape, dims_count, &code);
    if (!problem.empty()) return Error(code, problem);
  }
  return next(request, name, data_type, shape, dims_count);
}

}  // extern "C"
