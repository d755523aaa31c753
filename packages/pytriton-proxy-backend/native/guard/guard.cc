// A library to be loaded into tritonserver before its own (LD_PRELOAD). It stands in front of a few functions that the
// server calls through the dynamic linker, and refuses what would end the server or take all its memory:
//
//   readv                       requests as they arrive on HTTP connections: see http_scan.h
//   accept4, accept, close,
//   writev                      to know which descriptors are such connections, and when a request is answered; and to
//                               correct what the answer says: see http_response.h
//   ioctl                       to spread HTTP connections over the threads of the front end: see http_threads.h
//   socketpair, send, recv      so that no part of an answer is lost where such a thread is behind: see http_deferrals.h
//   syscall, epoll_ctl,
//   epoll_wait                  to save the front end most of its calls to epoll: see http_poll.h
//   inflate                     what compressed requests grow to, and the JSON in it
//   TRITONSERVER_Inference...   the shapes of inputs, for which the front ends take memory
//   TRITONSERVER_DataType...    a size by which the front ends divide
//   signal                      to be dead at once after a crash, with a word of why: see crash.h
//   TRITONSERVER_InferenceRequestSetResponseCallback
//                               to know how requests end: see outcomes.h
//   TRITONSERVER_InferenceRequestSet...Parameter
//                               names that are no inputs: see generate_errors.h
//   writev, too                 a page about the server: see page.h
//   TRITONSERVER_ServerOptionsSetLogFile
//                               to open the log anew once its file was moved: see log_file.h
//   shm_open                    names that only Triton's Python backend may use
//   mmap, munmap, TRITONBACKEND_OutputBuffer
//                               memory of callers whose files get shorter: see shared_mappings.h
//   setpriority, pthread_create to know the threads of instances, which a model must not be deleted beside
//   sendmsg, recvmsg            requests over gRPC: who asks a server that is replaced is to ask the one that follows
//   bind, listen, accept4       to serve inference over gRPC in place of Triton's own front end: see ../grpc/front_end.h
//   bind, listen, shutdown      to hand the sockets that listen to the server that is to follow: see listeners.h
//
// In any other program it does nothing and hands the calls on, and in children of the server as well: they have copies of
// its descriptors, which they may close, and not its callers.

#include <arpa/inet.h>
#include <fcntl.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../grpc/front_end.h"
#include "connections.h"
#include "crash.h"
#include "generate_answer.h"
#include "generate_errors.h"
#include "hooks.h"
#include "http_callers.h"
#include "http_deferrals.h"
#include "instance_threads.h"
#include "json_reader.h"
#include "listeners.h"
#include "log_file.h"
#include "outcomes.h"
#include "page.h"
#include "protections.h"
#include "shape_check.h"
#include "model_readiness.h"
#include "shared_mappings.h"
#include "startup.h"
#include "trace_flag.h"

// The part of Triton's C API that is used here; the ABI only grows.
struct TRITONBACKEND_Output;
struct TRITONSERVER_BufferAttributes;
struct TRITONSERVER_Error;
struct TRITONSERVER_InferenceRequest;
struct TRITONSERVER_InferenceResponse;
struct TRITONSERVER_Message;
struct TRITONSERVER_ResponseAllocator;
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
constexpr uint32_t kFinal = 1;       // TRITONSERVER_RESPONSE_COMPLETE_FINAL

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
// Before the same is logged again.
constexpr time_t kSayAgainSeconds = 10;
// How long the request of a caller who is turned away is waited for, and all others who come with it.
constexpr int kTurnedAwayMs = 10;
constexpr uint64_t kMaxDrainBytes = 256ull << 20;
// A caller who sends many requests ahead reads no answers.
constexpr size_t kMostUnanswered = 128;
// How often it is looked whether the file of the log was moved.
constexpr std::chrono::seconds kLogFilePause{1};
// How long what is said of the models may be of before.
constexpr std::chrono::seconds kPagePause{1};
constexpr uint32_t kReadyModels = 1;  // TRITONSERVER_INDEX_FLAG_READY
constexpr uint32_t kFirstDim = 2;     // TRITONSERVER_BATCH_FIRST_DIM
constexpr uint32_t kDecoupled = 2;    // TRITONSERVER_TXN_DECOUPLED

// The shared memory that the starter asks for to try out what is in force.
constexpr char kTriedFile[] = "/pytriton-self-test";
constexpr off_t kTriedBytes = 4096;

// What is called of Triton besides.
struct TritonFunctions {
  TRITONSERVER_Error* (*make_error)(int code, const char* text);
  TRITONSERVER_Error* (*byte_size)(TRITONSERVER_BufferAttributes* attributes, size_t* size);
  TRITONSERVER_Error* (*cancel)(TRITONSERVER_InferenceRequest* request);
  void (*delete_error)(TRITONSERVER_Error* error);
  int (*error_code)(TRITONSERVER_Error* error);
  const char* (*error_text)(TRITONSERVER_Error* error);
  TRITONSERVER_Error* (*response_error)(TRITONSERVER_InferenceResponse* response);
  TRITONSERVER_Error* (*to_json)(TRITONSERVER_Message* message, const char** text, size_t* size);
  TRITONSERVER_Error* (*delete_message)(TRITONSERVER_Message* message);
  TRITONSERVER_Error* (*index)(TRITONSERVER_Server* server, uint32_t flags, TRITONSERVER_Message** message);
  TRITONSERVER_Error* (*properties)(TRITONSERVER_Server* server, const char* model, int64_t version, uint32_t* flags,
                                    void* none);
  TRITONSERVER_Error* (*batch_properties)(TRITONSERVER_Server* server, const char* model, int64_t version,
                                          uint32_t* flags, void* none);
  TRITONSERVER_Error* (*output_count)(TRITONSERVER_InferenceResponse* response, uint32_t* count);
  TRITONSERVER_Error* (*output)(TRITONSERVER_InferenceResponse* response, uint32_t index, const char** name, int* type,
                                const int64_t** shape, uint64_t* dims_count, const void** base, size_t* size,
                                int* memory_type, int64_t* memory_type_id, void** user);
};
TritonFunctions g_triton{};

template <typename Function>
void Find(Function* function, const char* name) {
  *function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// Whether a call failed; the error is gone then.
bool IsError(TRITONSERVER_Error* error) {
  if (error != nullptr) g_triton.delete_error(error);
  return error != nullptr;
}

// Servers from 2.39 on can.
void CancelRequest(TRITONSERVER_InferenceRequest* request) {
  if (g_triton.cancel != nullptr) IsError(g_triton.cancel(request));
}

// The server, as long as it is there; who asks it anything but what it does by itself has the mutex, shared.
struct ServerReference {
  std::shared_mutex mutex;
  TRITONSERVER_Server* server = nullptr;
};

struct Guard {
  Limits limits;
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
std::atomic<InForce*> g_in_force{nullptr};

Guard* Active() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  return in_force == nullptr ? nullptr : in_force->guard.load(std::memory_order_acquire);
}

grpc::FrontEnd* ActiveFrontEnd() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  return in_force == nullptr ? nullptr : in_force->front_end.load(std::memory_order_acquire);
}

void LeaveChild() {
  InForce* const in_force = g_in_force.load(std::memory_order_relaxed);
  in_force->guard.store(nullptr, std::memory_order_relaxed);
  in_force->front_end.store(nullptr, std::memory_order_relaxed);
}

// False where the system has no memory.
bool PutInForce(Guard* guard) {
  void* const page = mmap(nullptr, sizeof(InForce), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return false;
  // Since Linux 4.14. For a fork the handler would do, which a bare `clone` does not run.
  madvise(page, sizeof(InForce), MADV_WIPEONFORK);
  auto* const in_force = new (page) InForce{};
  in_force->guard.store(guard, std::memory_order_relaxed);
  in_force->process = getpid();
  g_in_force.store(in_force, std::memory_order_release);
  pthread_atfork(nullptr, nullptr, LeaveChild);
  return true;
}

// Whether this is a child that has the memory of this process itself (`vfork`), and is about to start another program.
bool IsInChild() {
  const InForce* const in_force = g_in_force.load(std::memory_order_acquire);
  // By the system call: old libraries remember the number.
  return in_force != nullptr && syscall(SYS_getpid) != in_force->process;
}

// Whether this thread reads HTTP connections. It also handles their requests, but not in the call that reads: what it
// reads in between belongs to other requests.
thread_local bool t_reads_http = false;

// Of the front end whose connections this thread accepts; null in other threads. Kept, as those threads are.
thread_local HttpThreads* t_http_threads = nullptr;

// Never destroyed: threads run until the end of the process.
HttpDeferrals& Deferrals() {
  static auto* const made = new HttpDeferrals;
  return *made;
}


// The epoll at which this thread has waited last; and what keeps the connections of one, null before the first.
thread_local int t_epoll = -1;
thread_local HttpPoll* t_http_poll = nullptr;

// The connection that this thread reads no more until its request is answered: the next request that it makes is of that.
thread_local int t_paused = -1;

// The response callback of a request that this thread makes, until it is handed to Triton: what stands in front of it.
thread_local struct WatchedResponses* t_watched = nullptr;

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

// The file of shared memory that this thread has opened last and not mapped yet.
thread_local int t_shared_file = -1;

// Refusals come in bursts; a line each would be an attack on the log.
void LogRefusal(const std::string& text) {
  if (const Guard* guard = Active(); guard != nullptr && guard->listeners.is_tried()) return;
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
  LogRefusal(text);
  return g_triton.make_error(code, text.c_str());
}

// --- HTTP connections ----------------------------------------------------------------------------------------------

void ReleaseMemory(Guard* guard, Connection* connection) {
  guard->bodies.Release(connection->charged);
  connection->charged = 0;
}

// Counts what the request has come to need. False if all in flight need too much.
bool ReserveMemory(Guard* guard, Connection* connection) {
  uint64_t needed = connection->scan.memory();
  for (const auto& request : connection->unanswered) {
    if (request != nullptr && request->generate != nullptr) needed += request->generate->memory();
  }
  if (needed <= kSmall || needed <= connection->charged) return true;
  if (!guard->bodies.TryReserve(needed - connection->charged, guard->limits.max_in_flight_bytes)) return false;
  connection->charged = needed;
  return true;
}

// Counts a complete request among those that wait for their response.
void Await(Guard* guard, Connection* connection) {
  const uint64_t sent = connection->scan.body_bytes();
  if (sent <= kSmall / kBytesPerJsonByte) return;
  guard->awaiting.fetch_add(sent, std::memory_order_relaxed);
  connection->awaiting += sent;
}

void StopAwaiting(Guard* guard, Connection* connection) {
  guard->awaiting.fetch_sub(connection->awaiting, std::memory_order_relaxed);
  connection->awaiting = 0;
}

const char* ReasonPhrase(int status) {
  switch (status) {
    case kNotAllowed:
      return "Method Not Allowed";
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
    case 500:
      return "Internal Server Error";
    default:
      return "Bad Request";
  }
}

std::string StatusText(int status) { return std::to_string(status) + " " + ReasonPhrase(status); }

// Answers in place of the server, which never sees the request.
void SendErrorResponse(int fd, const Refusal& refusal) {
  const bool is_head = refusal.status == kNotAllowed;
  const std::string body = is_head ? "" : "{\"error\":\"" + refusal.text + "\"}";
  const std::string answer = "HTTP/1.1 " + StatusText(refusal.status) +
                             (is_head ? "\r\nAllow: GET, POST" : "\r\nContent-Type: application/json") +
                             "\r\nConnection: close\r\nContent-Length: " + std::to_string(body.size()) +
                             "\r\n\r\n" + body;
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

void CountRefusal(Guard* guard, const Connection* connection, const Refusal& refusal) {
  InferencePath path;
  if (!connection->scan.FindInference(&path)) return;
  guard->outcomes.Count(path.model, Protocol::kHttp, OutcomeOfStatus(refusal.status, false));
}

ssize_t Refuse(Connection* connection, int fd, const Refusal& refusal, size_t before) {
  // Of those who look whether a server is there nothing is to be told.
  if (refusal.status != kNotAllowed) LogRefusal(refusal.text);
  const bool is_behind_another = connection->awaits_response() || before > 0;
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

// Counts what the caller of a connection gave up.
void CountLeft(const Connection& connection) {
  for (const auto& request : connection.unanswered) {
    if (request != nullptr) request->Count(Outcome::kCancelled);
  }
  if (connection.streamed != nullptr) connection.streamed->Count(Outcome::kCancelled);
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
  const auto next = NEXT(epoll_ctl);
  return next(epoll, operation, fd, event);
}

int NextEpollWait(int epoll, epoll_event* events, int most, int timeout_ms) {
  const auto next = NEXT(epoll_wait);
  return next(epoll, events, most, timeout_ms);
}

// What came of a connection while its request is served. A caller who sends no more has left, as to most servers.
uint32_t OnUnwanted(int fd, uint32_t events) {
  char byte;
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0 && recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0) {
    return EPOLLRDHUP;
  }
  Guard* const guard = Active();
  const Connection* const connection = guard->connections.FindKnown(fd);
  // The guard itself ends what it reads of one that it has refused behind a request that is served.
  if (connection != nullptr && connection->is_refused) return 0;
  if (connection != nullptr) CountLeft(*connection);
  guard->callers.OnLeave(guard->connections.TakeRequest(fd), fd);
  return 0;
}

int ControlEpoll(int epoll, int operation, int fd, epoll_event* event) {
  Interest* interest = FindInterest(fd);
  HttpPoll* poll = interest == nullptr ? nullptr : interest->poll.load(std::memory_order_acquire);
  if (poll == nullptr && interest != nullptr && t_epoll == epoll && HttpPoll::CanKeep(operation, fd, event)) {
    if (t_http_poll == nullptr) t_http_poll = new HttpPoll(epoll, {NextEpollControl, NextEpollWait, FindInterest, OnUnwanted});
    poll = t_http_poll;
  }
  if (poll == nullptr || poll->epoll() != epoll) return NextEpollControl(epoll, operation, fd, event);
  if (poll == t_http_poll && operation == EPOLL_CTL_DEL) t_paused = fd;
  if (poll == t_http_poll && operation == EPOLL_CTL_ADD && t_paused == fd) t_paused = -1;
  return poll->Control(interest, operation, fd, event, poll == t_http_poll);
}

int WaitAtEpoll(int epoll, epoll_event* events, int most, int timeout_ms) {
  t_epoll = epoll;
  HttpPoll* const poll = Active() == nullptr ? nullptr : t_http_poll;
  if (poll == nullptr || poll->epoll() != epoll) return NextEpollWait(epoll, events, most, timeout_ms);
  return poll->Wait(events, most, timeout_ms);
}

// Kept for the time when the process may open nothing more.
std::atomic<int> g_spare{-1};

// Answers the first of a caller's requests, where it has come with the connection and has no body. The server is alive; for
// others it has no descriptor.
void AnswerTurnedAway(int fd) {
  constexpr std::string_view kLive = "GET /v2/health/live ";
  constexpr std::string_view kAlive = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
  constexpr std::string_view kNone =
      "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 47\r\nConnection: close\r\n\r\n"
      "{\"error\":\"the server has too many open files\"}\n";
  pollfd readable{fd, POLLIN, 0};
  char request[4096];
  if (poll(&readable, 1, kTurnedAwayMs) <= 0) return;
  const ssize_t size = recv(fd, request, sizeof(request), MSG_DONTWAIT);
  const std::string_view text(request, size > 0 ? size : 0);
  if (text.rfind("GET ", 0) != 0) return;
  const std::string_view answer = text.rfind(kLive, 0) == 0 ? kAlive : kNone;
  (void)!send(fd, answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Turns a caller away for whom no descriptor is left: he would wait, and the server would ask for him without a pause.
template <typename Call>
void TurnAway(const Call& next) {
  static std::mutex mutex;
  static time_t said = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto close_it = NEXT(close);
  if (const int spare = g_spare.exchange(-1); spare >= 0) close_it(spare);
  const int fd = next();
  if (fd >= 0) {
    AnswerTurnedAway(fd);
    close_it(fd);
  }
  g_spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (const time_t now = time(nullptr); now >= said + kSayAgainSeconds) {
    said = now;
    Log('W', "Too many open files: callers over HTTP are turned away. Raise the limit (ulimit -Hn), or let callers keep "
             "fewer connections");
  }
}

template <typename Call>
int Accept(int listener, Call next) {
  Guard* guard = Active();
  if (IsHandedOver(guard, listener)) {
    errno = EAGAIN;
    return -1;
  }
  int fd = next();
  if (guard != nullptr && fd < 0 && (errno == EMFILE || errno == ENFILE) && IsInternet(listener)) {
    TurnAway(next);
    errno = EAGAIN;
    return -1;
  }
  if (const auto* front_end = ActiveFrontEnd(); front_end != nullptr && front_end->Has(listener)) {
    // Whoever else finds this port of the loopback interface is to come through the front end.
    for (; fd >= 0 && !front_end->IsOwn(fd); fd = next()) close(fd);
    return fd;
  }
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

// A request that changes the settings of traces over HTTP has the front end for gRPC leave requests to Triton's own.
void LookForTraces(std::string_view begin) {
  grpc::FrontEnd* const front_end = ActiveFrontEnd();
  if (front_end == nullptr || begin.empty() || begin[0] != 'P') return;
  const std::string_view line = begin.substr(0, std::min(begin.find('\r'), begin.size()));
  if (line.find("/trace/setting") != std::string_view::npos) front_end->ForwardAll();
}

void BeginOutcome(Guard* guard, Connection* connection) {
  InferencePath path;
  bool wants_html = false;
  RequestText text = connection->scan.TakeText();
  std::shared_ptr<RequestOutcome> request;
  if (connection->scan.FindInference(&path)) {
    request = std::make_shared<RequestOutcome>(&guard->outcomes, Protocol::kHttp, path.model);
    request->is_stream = path.is_stream;
    if (path.is_stream) request->backlog = std::make_shared<StreamBacklog>();
    request->has_chunks = path.has_chunks;
    request->is_post = path.is_post;
    if (connection->scan.keeps_text()) {
      request->generate = std::make_unique<GenerateRequest>(
          GenerateRequest{path.model, path.version, path.endpoint, std::move(text), std::nullopt});
    }
  } else if (guard->limits.page != 0 && connection->scan.AsksForPage(&wants_html)) {
    request = std::make_shared<RequestOutcome>(&guard->uncounted, Protocol::kHttp, "");
    request->is_page = true;
    request->wants_html = wants_html;
  }
  connection->unanswered.push_back(std::move(request));
}

// Looks at what was read. Returns how much of it the server is to see.
ssize_t Inspect(Guard* guard, Connection* connection, int fd, const iovec* parts, int count, size_t size) {
  Reach(Protection::kHttpRequests);
  t_reads_http = true;
  HttpScan& scan = connection->scan;
  size_t seen = 0;
  size_t request_begin = 0;  // of the request that is being read, in these bytes
  for (int i = 0; i < count && seen < size; ++i) {
    auto* data = static_cast<char*>(parts[i].iov_base);
    size_t left = std::min(parts[i].iov_len, size - seen);
    while (left > 0) {
      if (scan.complete()) {
        if (connection->awaits_response() != connection->is_pipelined) {
          connection->is_pipelined = connection->awaits_response();
          guard->pipelined.fetch_add(connection->is_pipelined ? 1 : -1);
        }
        if (!connection->awaits_response()) ReleaseMemory(guard, connection);
        scan.Begin();
        LookForTraces({data, left});
        // Whose answer closes the connection: the next one is for the server that follows.
        scan.set_last(!guard->listeners.accepts());
        scan.set_makes_spans(guard->makes_spans);
        request_begin = seen;
      }
      const size_t used = scan.Feed(data, left, guard->limits, guard->max_pieces);
      Refusal refusal = scan.refusal();
      if (refusal.status == 0 && !ReserveMemory(guard, connection)) {
        refusal = {503, "the requests in flight need more than " + Bytes(guard->limits.max_in_flight_bytes) +
                            ", the limit max_in_flight_bytes of the guard; try again later"};
      }
      if (refusal.status == 0 && scan.complete() && connection->unanswered.size() >= kMostUnanswered) {
        refusal = {503, "more than " + std::to_string(kMostUnanswered) + " requests of one connection wait for their answers"};
      }
      if (refusal.status == 0 && scan.is_compressed() && guard->leaked.load() > guard->limits.max_in_flight_bytes / 4) {
        refusal = {503, "compressed requests are not taken any more until a restart: those that failed have left " +
                            Bytes(guard->leaked.load()) + " in the server, which it never gives back"};
      }
      if (refusal.status != 0) {
        CountRefusal(guard, connection, refusal);
        return Refuse(connection, fd, refusal, request_begin);
      }
      if (scan.complete()) {
        Await(guard, connection);
        BeginOutcome(guard, connection);
      }
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

// What a model takes and gives; nothing where it is not there.
ModelInterface InterfaceOf(Guard* guard, const std::string& model, int64_t version);

// What there is to be told of the server in place of a path that it has not.
std::unique_ptr<HttpResponse> PageFor(Guard* guard, int fd, bool is_html);

// What an answer to a request says in place of the front end's words; empty: those stay.
std::string BetterError(Guard* guard, const RequestOutcome& request, int status) {
  if (status == kNotAllowed && !request.is_post) return "inference takes POST, with the inputs as JSON: curl sends it with -d '{...}'";
  const bool is_wrong = status == 400 || status == 500;
  if (!is_wrong || request.generate == nullptr || request.is_submitted || guard->hides_models) return "";
  const GenerateRequest& generate = *request.generate;
  const bool has_parameters =
      guard->limits.generate_extra_names != 0 || guard->models.HasParameters(generate.model, generate.version);
  const std::vector<GenerateInput> inputs = InterfaceOf(guard, generate.model, generate.version).inputs;
  return inputs.empty() ? "" : FindGenerateError(generate, inputs, has_parameters);
}

// How an answer to `generate` of a decoupled model ends, which the front end has begun before it knew.
GenerateBody::Ending EndGenerate(RequestOutcome* request) {
  const std::string error = request->responses->FindError();
  if (error.empty()) {
    request->Count(Outcome::kOk);
    return {};
  }
  const Outcome outcome = request->NotedOr(Outcome::kInvalid);
  request->Count(outcome);
  const int status = StatusOfOutcome(outcome, 400);
  return {StatusText(status == 0 ? 400 : status), "{\"error\":" + JsonString(error) + "}"};
}

// Where an answer to `generate` says less than its caller can be told.
void CorrectGenerate(Connection* connection) {
  const std::shared_ptr<RequestOutcome>& request = connection->unanswered.front();
  const bool is_decoupled = request->responses->is_decoupled();
  std::vector<OutputRows> rows = request->responses->rows();
  if (!is_decoupled && rows.empty()) return;
  std::function<GenerateBody::Ending()> end = [] { return GenerateBody::Ending{}; };
  if (is_decoupled) end = [request] { return EndGenerate(request.get()); };
  connection->corrected = std::make_unique<HttpResponse>(std::make_unique<GenerateBody>(std::move(rows), std::move(end)),
                                                         !request->has_chunks);
}

// Before a response is written: its caller may look at the counts as soon as it has it.
void BeginResponse(Guard* guard, Connection* connection, int fd, std::string_view status) {
  if (status.empty() || connection->corrected != nullptr) return;
  RequestOutcome* const request = connection->unanswered.front().get();
  if (request == nullptr) return;
  const int code = std::atoi(std::string(status.substr(0, 3)).c_str());
  if (request->is_page) {
    if (code == 404) connection->corrected = PageFor(guard, fd, request->wants_html);
    return;
  }
  const std::string error = code < 400 ? "" : BetterError(guard, *request, code);
  const Outcome outcome =
      error.empty() ? request->NotedOr(OutcomeOfStatus(code, request->is_submitted)) : Outcome::kInvalid;
  const bool is_held = code == 200 && request->responses != nullptr && request->responses->is_decoupled();
  if (!is_held && (!request->is_stream || !request->is_submitted)) request->Count(outcome);
  if (code == 200 && request->responses != nullptr) CorrectGenerate(connection);
  if (connection->corrected != nullptr) return;
  if (!error.empty()) {
    const bool is_method = code == kNotAllowed;
    connection->corrected =
        std::make_unique<HttpResponse>(StatusText(is_method ? kNotAllowed : 400), !request->has_chunks,
                                       "{\"error\":" + JsonString(error) + "}", is_method ? "Allow: POST\r\n" : "");
    return;
  }
  const int right = StatusOfOutcome(outcome, code);
  if (right == 0 && request->has_chunks) return;
  connection->corrected = std::make_unique<HttpResponse>(right == 0 ? "" : StatusText(right), !request->has_chunks);
}

ssize_t WriteCorrected(Connection* connection, int fd, const iovec* parts, int count) {
  const ssize_t size = connection->corrected->Write(parts, count, [fd](const char* data, size_t bytes) {
    return send(fd, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  });
  if (connection->corrected->is_at_end()) shutdown(fd, SHUT_WR);
  if (connection->corrected->is_done()) connection->corrected.reset();
  return size;
}

void OnResponse(Guard* guard, Connection* connection) {
  auto& request = connection->unanswered.front();
  // Whose answer goes on may still leave.
  const bool goes_on = request != nullptr && (request->is_stream || request->responses != nullptr);
  connection->streamed = goes_on ? std::move(request) : nullptr;
  connection->unanswered.erase(connection->unanswered.begin());
  StopAwaiting(guard, connection);
  if (connection->scan.complete() && !connection->awaits_response()) ReleaseMemory(guard, connection);
}

void OnClose(Guard* guard, Connection* connection) {
  ReleaseMemory(guard, connection);
  StopAwaiting(guard, connection);
  if (connection->is_pipelined) guard->pipelined.fetch_sub(1);
  connection->is_pipelined = false;
  CountLeft(*connection);
  connection->unanswered.clear();
  connection->streamed.reset();
  connection->corrected.reset();
  connection->scan.Clear();
}

// --- how requests end ------------------------------------------------------------------------------------------------

// Stands in front of a front end's callback for the responses of a request, until the last has come.
struct WatchedResponses {
  void (*next)(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* user);
  void* user;
  std::shared_ptr<RequestOutcome> request;
};

void NoteError(RequestOutcome* request, TRITONSERVER_Error* error) {
  const char* const text = g_triton.error_text(error);
  request->Note(OutcomeOfError(g_triton.error_code(error), text));
  if (request->responses != nullptr) request->responses->AddError(text);
}

// The outputs of a response that have several elements for each of several samples.
std::vector<OutputRows> RowsOf(TRITONSERVER_InferenceResponse* response) {
  std::vector<OutputRows> all;
  uint32_t count = 0;
  if (IsError(g_triton.output_count(response, &count))) return all;
  for (uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    const int64_t* shape = nullptr;
    uint64_t dims_count = 0;
    int type = 0, memory_type = 0;
    const void* base = nullptr;
    size_t size = 0;
    int64_t memory_type_id = 0;
    void* user = nullptr;
    const bool is_error = IsError(g_triton.output(response, i, &name, &type, &shape, &dims_count, &base, &size,
                                                  &memory_type, &memory_type_id, &user));
    OutputRows rows;
    if (!is_error && FindRows(name, shape, dims_count, &rows)) all.push_back(std::move(rows));
  }
  return all;
}

// Before Triton has a request to `generate`: what is to be known of its responses.
void ExpectResponses(TRITONSERVER_Server* server, RequestOutcome* request) {
  if (request->generate == nullptr || request->is_stream || g_triton.properties == nullptr) return;
  if (g_triton.batch_properties == nullptr || g_triton.output_count == nullptr || g_triton.output == nullptr) return;
  const GenerateRequest& generate = *request->generate;
  uint32_t batching = 0;
  uint32_t transactions = 0;
  if (IsError(g_triton.batch_properties(server, generate.model.c_str(), generate.version, &batching, nullptr)) ||
      IsError(g_triton.properties(server, generate.model.c_str(), generate.version, &transactions, nullptr))) {
    return;
  }
  const bool is_batched = (batching & kFirstDim) != 0;
  const bool is_decoupled = (transactions & kDecoupled) != 0;
  if (!is_batched && !is_decoupled) return;
  request->responses = std::make_unique<GenerateResponses>(generate.model, is_batched, is_decoupled);
}

void OnWatchedResponse(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* user) {
  auto* const watched = static_cast<WatchedResponses*>(user);
  const bool is_final = (flags & kFinal) != 0;
  const std::unique_ptr<WatchedResponses> ended(is_final ? watched : nullptr);
  RequestOutcome* const request = watched->request.get();
  TRITONSERVER_Error* const error = response == nullptr ? nullptr : g_triton.response_error(response);
  if (response != nullptr && error == nullptr && request->responses != nullptr) {
    GenerateResponses& responses = *request->responses;
    responses.Add(responses.is_batched() ? RowsOf(response) : std::vector<OutputRows>());
  }
  if (error != nullptr) {
    NoteError(request, error);
    g_triton.delete_error(error);
  }
  if (response != nullptr && request->backlog != nullptr) {
    if (const uint64_t bytes = GivenResponse::TakeBytes(); bytes > 0) request->backlog->Add(bytes);
    GivenResponse::Note(request->backlog);
  }
  if (is_final) {
    request->Conclude();
    // The status of such a response was written when it began.
    if (request->is_stream) request->CountNotedOr(Outcome::kOk);
  }
  watched->next(response, flags, watched->user);
}

// The request whose responses a front end is about to ask for: that of the HTTP connection which this thread has stopped
// reading, or one that the front end for gRPC has handed on.
std::shared_ptr<RequestOutcome> FindOutcome(Guard* guard, const TRITONSERVER_InferenceRequest* request) {
  if (t_paused >= 0) {
    const Connection* const connection = guard->connections.FindKnown(t_paused);
    return connection == nullptr || connection->unanswered.empty() ? nullptr : connection->unanswered.front();
  }
  grpc::FrontEnd* const front_end = ActiveFrontEnd();
  return front_end == nullptr ? nullptr : front_end->forwarded().FindOutcome(request);
}

// Hands the request that this thread has made to Triton. What watches its responses may be gone when that returns.
template <typename Submit>
TRITONSERVER_Error* SubmitWatched(TRITONSERVER_Server* server, Submit submit) {
  WatchedResponses* const watched = std::exchange(t_watched, nullptr);
  const auto request = watched == nullptr ? nullptr : watched->request;
  if (request != nullptr) ExpectResponses(server, request.get());
  TRITONSERVER_Error* const error = submit();
  if (request == nullptr) return error;
  request->is_submitted = error == nullptr;
  if (error == nullptr) {
    request->generate.reset();
    return error;
  }
  delete watched;
  NoteError(request.get(), error);
  return error;
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

// --- the front end for gRPC -----------------------------------------------------------------------------------------

// Copies that a forked child of the starter may hold, as a message that nobody reads, too, are to listen no longer than
// this server.
void EndListener(int fd) {
  shutdown(fd, SHUT_RDWR);
  Active()->listeners.OnClose(fd);
}

void StartFrontEnd(Guard& guard, int argc, char** argv) {
  if (guard.limits.grpc_front_end == 0) return;
  grpc::Surroundings surroundings;
  surroundings.bind = NEXT(bind);
  surroundings.listen = NEXT(listen);
  surroundings.accept4 = NEXT(accept4);
  surroundings.close = NEXT(close);
  surroundings.adopt = [](int fd, const sockaddr* address, socklen_t size) {
    return Active()->listeners.Adopt(fd, address, size);
  };
  surroundings.on_listen = [](int fd) {
    Reach(Protection::kGrpcFrontEnd);
    Active()->listeners.OnListen(fd);
  };
  surroundings.on_close = EndListener;
  surroundings.log = Log;
  grpc::FrontEnd* const front_end = grpc::FrontEnd::Make(argc, argv, surroundings, guard.limits.max_request_bytes);
  if (front_end == nullptr) return;
  grpc::Service& service = front_end->service();
  service.reserve = [](uint64_t bytes) {
    return Active()->bodies.TryReserve(bytes, Active()->limits.max_in_flight_bytes);
  };
  service.release = [](uint64_t bytes) { Active()->bodies.Release(bytes); };
  service.on_call = [] { Reach(Protection::kGrpcCalls); };
  service.outcomes = &guard.outcomes;
  service.makes_spans = guard.makes_spans;
  service.accepts = [] { return Active()->listeners.accepts(); };
  service.has_left = [] { return Active()->listeners.has_left(); };
  g_in_force.load()->front_end.store(front_end, std::memory_order_release);
}

// Takes the text out of a message of Triton's, which is gone then.
std::string TakeText(TRITONSERVER_Message* message) {
  const char* text = nullptr;
  size_t size = 0;
  TRITONSERVER_Error* const error = g_triton.to_json(message, &text, &size);
  std::string taken = error == nullptr && text != nullptr ? std::string(text, size) : "";
  if (error != nullptr) g_triton.delete_error(error);
  if (TRITONSERVER_Error* const kept = g_triton.delete_message(message); kept != nullptr) g_triton.delete_error(kept);
  return taken;
}

bool CanRead() { return g_triton.to_json != nullptr && g_triton.delete_message != nullptr; }

// Asks the server for something that it says in JSON; empty where it does not.
template <typename Ask>
std::string AskServer(Guard* guard, const Ask& ask) {
  TRITONSERVER_Message* message = nullptr;
  {
    const std::shared_lock<std::shared_mutex> lock(guard->server.mutex);
    if (guard->server.server == nullptr) return "";
    TRITONSERVER_Error* const error = ask(guard->server.server, &message);
    if (error != nullptr) {
      g_triton.delete_error(error);
      return "";
    }
  }
  return TakeText(message);
}

ModelInterface InterfaceOf(Guard* guard, const std::string& model, int64_t version) {
  using Ask = TRITONSERVER_Error* (*)(TRITONSERVER_Server*, const char*, int64_t, uint32_t, TRITONSERVER_Message**);
  const auto ask = reinterpret_cast<Ask>(FindNext(Hook::TRITONSERVER_ServerModelConfig));
  if (ask == nullptr || !CanRead()) return {};
  return ReadInterface(AskServer(guard, [&](TRITONSERVER_Server* server, TRITONSERVER_Message** message) {
    return ask(server, model.c_str(), version, 1, message);
  }));
}

// The models that are ready.
std::vector<PageModel> ModelsOf(Guard* guard) {
  if (g_triton.index == nullptr || !CanRead() || guard->hides_models) return {};
  std::vector<PageModel> models = ReadIndex(AskServer(guard, [](TRITONSERVER_Server* server, TRITONSERVER_Message** message) {
    return g_triton.index(server, kReadyModels, message);
  }));
  for (PageModel& model : models) {
    model.interface = InterfaceOf(guard, model.name, -1);
    model.is_served = !guard->models.IsForsaken(model.name.c_str(), -1);
  }
  return models;
}

// The port at which a connection was accepted.
uint16_t PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  const bool is_six = address.ss_family == AF_INET6;
  return ntohs(is_six ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                      : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

std::unique_ptr<HttpResponse> PageFor(Guard* guard, int fd, bool is_html) {
  const uint16_t port = PortOf(fd);
  const auto texts = guard->page.Get(port, [&] {
    const std::vector<PageModel> models = ModelsOf(guard);
    // The address of this machine is nothing that callers are to know.
    return PageTexts{PageAsHtml(models, "http://localhost:" + std::to_string(port), guard->hides_models),
                     PageAsJson(models, guard->hides_models)};
  });
  return std::make_unique<HttpResponse>("200 OK", false, is_html ? texts->html : texts->json, PageHeaders(is_html),
                                        is_html ? "text/html; charset=utf-8" : "application/json");
}

// Triton makes a parameter of each name of a request to `generate` that is no input. A model that reads none would answer
// as if the name was right. What stands among `parameters` is meant as such. Null where nothing is wrong.
TRITONSERVER_Error* CheckName(const TRITONSERVER_InferenceRequest* request, const char* name) {
  Guard* guard = Active();
  if (guard == nullptr || name == nullptr || t_paused < 0 || guard->limits.generate_extra_names != 0) return nullptr;
  const auto outcome = FindOutcome(guard, request);
  if (outcome == nullptr || outcome->generate == nullptr) return nullptr;
  GenerateRequest& generate = *outcome->generate;
  if (!generate.own_names) {
    // Once: there may be very many names.
    const bool has_parameters = guard->models.HasParameters(generate.model, generate.version);
    generate.own_names = has_parameters ? OwnNames() : OwnNames(generate.body);
  }
  if (!generate.own_names->Has(name)) return nullptr;
  return g_triton.make_error(kInvalidArgument, ("'" + NameText(name) + "' is no input of the model").c_str());
}

// Whether any version of a model is served.
bool HasModel(const std::string& model) {
  Guard* const guard = Active();
  if (guard == nullptr || g_triton.properties == nullptr) return false;
  const std::shared_lock<std::shared_mutex> lock(guard->server.mutex);
  if (guard->server.server == nullptr) return false;
  uint32_t flags = 0;
  TRITONSERVER_Error* const error = g_triton.properties(guard->server.server, model.c_str(), -1, &flags, nullptr);
  if (error != nullptr) g_triton.delete_error(error);
  return error == nullptr;
}

// --- start ---------------------------------------------------------------------------------------------------------

__attribute__((constructor)) void Start(int argc, char** argv, char**) {
  if (!IsTritonServer()) return;
  FindAllNext();
  IsInProgram(nullptr);  // looks up where that is
  Find(&g_triton.make_error, "TRITONSERVER_ErrorNew");
  Find(&g_triton.byte_size, "TRITONSERVER_BufferAttributesByteSize");
  Find(&g_triton.cancel, "TRITONSERVER_InferenceRequestCancel");
  Find(&g_triton.delete_error, "TRITONSERVER_ErrorDelete");
  Find(&g_triton.error_code, "TRITONSERVER_ErrorCode");
  Find(&g_triton.error_text, "TRITONSERVER_ErrorMessage");
  Find(&g_triton.response_error, "TRITONSERVER_InferenceResponseError");
  Find(&g_triton.properties, "TRITONSERVER_ServerModelTransactionProperties");
  Find(&g_triton.batch_properties, "TRITONSERVER_ServerModelBatchProperties");
  Find(&g_triton.output_count, "TRITONSERVER_InferenceResponseOutputCount");
  Find(&g_triton.output, "TRITONSERVER_InferenceResponseOutput");
  Find(&g_triton.to_json, "TRITONSERVER_MessageSerializeToJson");
  Find(&g_triton.delete_message, "TRITONSERVER_MessageDelete");
  Find(&g_triton.index, "TRITONSERVER_ServerModelIndex");
  ReadSecrets(argc, argv);
  // Never freed: threads run until the end.
  Guard& guard = *new Guard;
  guard.limits = ReadSettings();
  guard.has_gpu = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
  guard.python_backend_prefix = PythonBackendPrefix(argc, argv);
  guard.listeners.Start();
  guard.outcomes.Start(HasModel);
  HideErrorMode();
  const uint64_t stack = EnlargeStacks(guard.limits.thread_stack_bytes);
  guard.max_pieces = std::max<uint64_t>(stack, 1 << 20) / kStackBytesPerPiece;
  large_requests();
  if (!guard.connections.Reserve() || !PutInForce(&guard)) {
    Log('W', "There is no memory for the table of connections: requests are not guarded.");
    return;
  }
  g_spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
  HandleCrashes();
  if (guard.listeners.has_starter()) EndWithStarter();
  // Before those: what it cannot mend is a crash.
  HandleSharedMemoryFaults();
  guard.makes_spans = MakesSpans(argc, argv);
  guard.hides_models = RestrictsModels(argc, argv);
  StartFrontEnd(guard, argc, argv);
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

void KeepLogFile(LogFile* log) {
  for (;; std::this_thread::sleep_for(kLogFilePause)) log->Look();
}

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
namespace grpc = pytriton::grpc;

extern "C" {

#define EXPORT __attribute__((visibility("default")))

// No program that the server starts gets a connection: one that outlives the server, such as a stub of the Python
// backend or what its model has started, would keep it open, and the caller would wait for an answer from nobody.
EXPORT int accept4(int listener, sockaddr* address, socklen_t* length, int flags) {
  const auto next = NEXT(accept4);
  return Accept(listener, [&] { return next(listener, address, length, flags | SOCK_CLOEXEC); });
}

EXPORT int accept(int listener, sockaddr* address, socklen_t* length) {
  const auto next = NEXT(accept4);
  return Accept(listener, [&] { return next(listener, address, length, SOCK_CLOEXEC); });
}

EXPORT int bind(int fd, const sockaddr* address, socklen_t length) noexcept {
  const auto next = NEXT(bind);
  Guard* guard = Active();
  int result = 0;
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr && front_end->Bind(fd, address, length, &result)) {
    return result;
  }
  if (guard != nullptr && guard->listeners.Adopt(fd, address, length)) return 0;
  return next(fd, address, length);
}

EXPORT int listen(int fd, int backlog) noexcept {
  const auto next = NEXT(listen);
  const int result = next(fd, backlog);
  Guard* guard = Active();
  grpc::FrontEnd* const front_end = ActiveFrontEnd();
  if (front_end != nullptr && front_end->Has(fd)) {
    if (result == 0) front_end->OnListen(fd);
    return result;
  }
  if (guard != nullptr && result == 0) guard->listeners.OnListen(fd);
  return result;
}

// The front end for gRPC ends its listener so, which the server that follows may have as well.
EXPORT int shutdown(int fd, int how) noexcept {
  const auto next = NEXT(shutdown);
  if (IsInChild()) return next(fd, how);
  Guard* guard = Active();
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr) front_end->OnClose(fd);
  return guard != nullptr && !guard->listeners.accepts() && guard->listeners.Has(fd) ? 0 : next(fd, how);
}

EXPORT int close(int fd) {
  const auto next = NEXT(close);
  if (IsInChild()) return next(fd);
  Guard* guard = Active();
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr) front_end->OnClose(fd);
  if (guard != nullptr && guard->listeners.Has(fd)) EndListener(fd);
  if (guard != nullptr) Deferrals().OnClose(fd);
  ForgetInterest(fd);
  if (guard != nullptr) {
    if (guard->connections.FindInterest(fd) != nullptr) Reach(Protection::kHttpEnds);
    guard->callers.OnLeave(guard->connections.TakeRequest(fd), fd);
  }
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Remove(fd);
  if (connection != nullptr) OnClose(guard, connection);
  return next(fd);
}

// Sockets of the server's own code alone: others may be read in other ways.
EXPORT int socketpair(int domain, int type, int protocol, int* fds) noexcept {
  const int result = NEXT(socketpair)(domain, type, protocol, fds);
  const bool is_stream = domain == AF_UNIX && (type & ~(SOCK_NONBLOCK | SOCK_CLOEXEC)) == SOCK_STREAM;
  if (result == 0 && is_stream && Active() != nullptr && IsInProgram(__builtin_return_address(0)) && !IsInChild()) {
    Deferrals().OnPair(fds[0], fds[1]);
  }
  return result;
}

EXPORT ssize_t send(int fd, const void* data, size_t size, int flags) {
  const auto next = NEXT(send);
  if (Active() == nullptr || !Deferrals().IsTo(fd, size) || IsInChild()) return next(fd, data, size, flags);
  Reach(Protection::kHttpDeferrals);
  return Deferrals().Write(fd, data, size, flags, next);
}

EXPORT ssize_t recv(int fd, void* data, size_t size, int flags) {
  const ssize_t received = NEXT(recv)(fd, data, size, flags);
  if (received > 0 && Active() != nullptr && Deferrals().IsReader(fd) && !IsInChild()) {
    const int error = errno;
    Deferrals().OnRead(fd, NEXT(send));
    errno = error;
  }
  return received;
}

EXPORT int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  return ControlEpoll(epoll, operation, fd, event);
}

EXPORT int epoll_wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  return WaitAtEpoll(epoll, events, most, timeout_ms);
}

// The server has functions for epoll of its own (libevent 2.1.12), which call this one.
EXPORT long syscall(long number, ...) noexcept {
  const auto next = NEXT(syscall);
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
  const auto next = NEXT(ioctl);
  va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  if (request == FIONREAD && t_http_threads != nullptr && Active() != nullptr && t_http_threads->connection() >= 0) {
    const int connection = t_http_threads->connection();
    const auto answer = t_http_threads->Ask(fd);
    if (answer) {
      Reach(Protection::kHttpThreads);
      if (answer->chosen != nullptr) Active()->connections.Assign(connection, answer->chosen);
      *static_cast<int*>(argument) = answer->bytes;
      return 0;
    }
  }
  return next(fd, request, argument);
}

EXPORT ssize_t readv(int fd, const iovec* parts, int count) {
  const auto next = NEXT(readv);
  Guard* guard = Active();
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Find(fd);
  if (connection == nullptr) return next(fd, parts, count);
  if (connection->is_refused) return DrainRequest(connection, fd);
  const bool is_idle = !connection->awaits_response() && (connection->scan.complete() || !connection->scan.started());
  const ssize_t size = next(fd, parts, count);
  if (size > 0 && is_idle && guard->listeners.has_left()) {
    return Refuse(connection, fd, {408, "the server was replaced; ask again over another connection"}, 0);
  }
  return size <= 0 ? size : Inspect(guard, connection, fd, parts, count, static_cast<size_t>(size));
}

EXPORT ssize_t writev(int fd, const iovec* parts, int count) {
  const auto next = NEXT(writev);
  Guard* guard = Active();
  const bool is_http = guard != nullptr && count > 0 && guard->connections.FindInterest(fd) != nullptr;
  if (is_http) Reach(Protection::kHttpResponses);
  Connection* connection = is_http ? guard->connections.FindKnown(fd) : nullptr;
  if (connection == nullptr) return next(fd, parts, count);
  HttpAnswers& answers = connection->answers;
  const uint64_t chunks = answers.chunks();
  const bool begins = answers.is_at_begin() && connection->awaits_response();
  const std::string status = begins ? StatusIn(parts, count) : "";
  BeginResponse(guard, connection, fd, status);
  // One response at a time: those that follow it come again.
  HttpAnswers behind = answers;
  const size_t given = SizeOf(parts, count);
  const size_t most = behind.Feed(parts, given);
  std::vector<iovec> first;
  if (most < given) {
    first = FirstOf(parts, count, most);
    parts = first.data();
    count = static_cast<int>(first.size());
  }
  const bool is_right = connection->corrected == nullptr;
  const ssize_t size = is_right ? next(fd, parts, count) : WriteCorrected(connection, fd, parts, count);
  if (size > 0 && static_cast<size_t>(size) < most) answers.Feed(parts, static_cast<size_t>(size));
  if (size > 0 && static_cast<size_t>(size) == most) answers = std::move(behind);
  if (size > 0 && !status.empty()) OnResponse(guard, connection);
  if (connection->streamed != nullptr && answers.chunks() != chunks) {
    connection->streamed->backlog->Take(answers.chunks() - chunks);
  }
  return size;
}

EXPORT ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const auto next = NEXT(sendmsg);
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
  const auto next = NEXT(recvmsg);
  Guard* guard = Active();
  Connection* connection = guard == nullptr ? nullptr : guard->connections.Find(fd);
  const ssize_t size = next(fd, message, flags);
  if (connection == nullptr || size <= 0) return size;
  Reach(Protection::kGrpcConnections);
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
  const auto next = NEXT(inflate);
  if (next == nullptr) return kStreamError;
  Guard* guard = Active();
  if (guard == nullptr || !IsInProgram(__builtin_return_address(0))) return next(stream, flush);
  if (t_reads_http) Reach(Protection::kCompressedBodies);
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
  const auto next = NEXT(TRITONSERVER_ServerInferAsync);
  Guard* guard = Active();
  const uint64_t charged = std::exchange(t_decompression.charged, 0);
  const uint64_t bytes = std::exchange(t_decompression.bytes, 0);
  // Before the call: the request may be gone after it.
  if (charged > 0) large_requests().Add(request, charged);
  const int connection = std::exchange(t_paused, -1);
  if (guard != nullptr && connection >= 0) {
    guard->callers.OnSubmit(request, connection);
    guard->connections.SetRequest(connection, request);
  }
  TRITONSERVER_Error* const error = SubmitWatched(server, [&] { return next(server, request, trace); });
  if (guard != nullptr && connection >= 0) {
    if (g_triton.cancel != nullptr) Reach(Protection::kHttpCallers);
    if (error == nullptr) guard->callers.OnSubmitted(request, connection);
  }
  if (bytes > 0 && error != nullptr) guard->leaked.fetch_add(bytes);
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr && error == nullptr) {
    front_end->forwarded().OnSubmitted(request);
  }
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetResponseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_ResponseAllocator* allocator, void* allocator_user,
    void (*on_response)(TRITONSERVER_InferenceResponse*, uint32_t, void*), void* user) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestSetResponseCallback);
  Guard* guard = Active();
  // The guard's own front end for gRPC tells by itself how a request ends.
  if (guard == nullptr || !IsInProgram(__builtin_return_address(0))) {
    return next(request, allocator, allocator_user, on_response, user);
  }
  auto outcome = FindOutcome(guard, request);
  if (outcome == nullptr) return next(request, allocator, allocator_user, on_response, user);
  auto watched = std::make_unique<WatchedResponses>(WatchedResponses{on_response, user, std::move(outcome)});
  TRITONSERVER_Error* const error = next(request, allocator, allocator_user, OnWatchedResponse, watched.get());
  if (error != nullptr) return error;
  // Of one that was not handed to Triton after all nobody will hear.
  delete std::exchange(t_watched, watched.release());
  return nullptr;
}

// By such a parameter a request that the front end for gRPC has handed on is found again.
EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetIntParameter(TRITONSERVER_InferenceRequest* request,
                                                                        const char* name, int64_t value) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestSetIntParameter);
  grpc::FrontEnd* const front_end = ActiveFrontEnd();
  if (front_end != nullptr && front_end->forwarded().OnParameter(request, name, value)) return nullptr;
  TRITONSERVER_Error* const error = CheckName(request, name);
  return error != nullptr ? error : next(request, name, value);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetStringParameter(TRITONSERVER_InferenceRequest* request,
                                                                           const char* name, const char* value) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestSetStringParameter);
  TRITONSERVER_Error* const error = CheckName(request, name);
  return error != nullptr ? error : next(request, name, value);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetBoolParameter(TRITONSERVER_InferenceRequest* request,
                                                                         const char* name, bool value) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestSetBoolParameter);
  TRITONSERVER_Error* const error = CheckName(request, name);
  return error != nullptr ? error : next(request, name, value);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetDoubleParameter(TRITONSERVER_InferenceRequest* request,
                                                                           const char* name, double value) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestSetDoubleParameter);
  TRITONSERVER_Error* const error = CheckName(request, name);
  return error != nullptr ? error : next(request, name, value);
}

// The server's own handlers of crashes may never end.
EXPORT sighandler_t signal(int number, sighandler_t handler) noexcept {
  const auto next = NEXT(signal);
  if (Active() != nullptr && IsCrash(number) && IsInProgram(__builtin_return_address(0))) {
    Reach(Protection::kCrashes);
    return SIG_DFL;
  }
  return next(number, handler);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerNew(TRITONSERVER_Server** server, void* options) {
  const auto next = NEXT(TRITONSERVER_ServerNew);
  TRITONSERVER_Error* const error = next(server, options);
  Guard* guard = Active();
  if (guard != nullptr) RememberModules();  // of backends, too
  if (guard != nullptr && error == nullptr) {
    const std::unique_lock<std::shared_mutex> lock(guard->server.mutex);
    guard->server.server = *server;
    if (guard->log_file) std::thread(KeepLogFile, &guard->log_file).detach();
  }
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr && error == nullptr) front_end->OnServer(*server);
  return error;
}

// What a load balancer asks. The proxy backend asks as well, for calls of callables, which wait for a worker.
EXPORT TRITONSERVER_Error* TRITONSERVER_ServerIsReady(TRITONSERVER_Server* server, bool* ready) {
  const auto next = NEXT(TRITONSERVER_ServerIsReady);
  TRITONSERVER_Error* const error = next(server, ready);
  Guard* guard = Active();
  if (guard != nullptr && error == nullptr && *ready) *ready = !guard->models.IsAnyForsaken();
  return error;
}

// Clients ask for it that wait for their model. Who has misspelt its name need not wait for long.
EXPORT TRITONSERVER_Error* TRITONSERVER_ServerModelConfig(TRITONSERVER_Server* server, const char* name,
                                                          int64_t version, uint32_t config_version, void** config) {
  const auto next = NEXT(TRITONSERVER_ServerModelConfig);
  TRITONSERVER_Error* const error = next(server, name, version, config_version, config);
  Guard* guard = Active();
  if (error == nullptr || guard == nullptr || !guard->listeners.is_complete()) return error;
  const std::string text = g_triton.error_text(error);
  if (!IsInProgram(__builtin_return_address(0)) || text.find("is not found") == std::string::npos) return error;
  TRITONSERVER_Error* const told =
      g_triton.make_error(g_triton.error_code(error), (text + ". The server has all of its models").c_str());
  g_triton.delete_error(error);
  return told;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerModelIsReady(TRITONSERVER_Server* server, const char* name,
                                                           int64_t version, bool* ready) {
  const auto next = NEXT(TRITONSERVER_ServerModelIsReady);
  TRITONSERVER_Error* const error = next(server, name, version, ready);
  Guard* guard = Active();
  if (guard != nullptr && error == nullptr && *ready && IsInProgram(__builtin_return_address(0))) {
    *ready = !guard->models.IsForsaken(name, version);
  }
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetLogFile(void* options, const char* file) {
  const auto next = NEXT(TRITONSERVER_ServerOptionsSetLogFile);
  TRITONSERVER_Error* const error = next(options, file);
  if (Guard* guard = Active(); guard != nullptr && error == nullptr) guard->log_file.OnOpened(file);
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetStrictReadiness(void* options, bool strict) {
  const auto next = NEXT(TRITONSERVER_ServerOptionsSetStrictReadiness);
  if (Guard* guard = Active(); guard != nullptr) guard->models.SetStrict(strict);
  return next(options, strict);
}

// For the proxy backend, see `guard_readiness.h` there.
EXPORT void pytriton_guard_add_instance(const void* instance, const void* model, const char* name, uint64_t version,
                                        IsServed is_served) {
  if (Guard* guard = Active(); guard != nullptr) guard->models.Add(instance, model, name, version, is_served);
}

EXPORT void pytriton_guard_ignore_parameters(const void* instance) {
  if (Guard* guard = Active(); guard != nullptr) guard->models.IgnoreParameters(instance);
}

EXPORT void pytriton_guard_remove_instance(const void* instance) {
  if (Guard* guard = Active(); guard != nullptr) guard->models.Remove(instance);
}

// For the proxy backend, see `stream_pace.h` there. A stream is a StreamBacklog, shared with whoever has taken it.
EXPORT void pytriton_guard_announce_response(uint64_t bytes, bool wants_stream) {
  GivenResponse::Announce(bytes, wants_stream);
}

EXPORT void* pytriton_guard_take_stream() {
  auto stream = GivenResponse::TakeStream();
  return stream == nullptr ? nullptr : new std::shared_ptr<StreamBacklog>(std::move(stream));
}

EXPORT uint64_t pytriton_guard_stream_waiting(const void* stream) {
  return (*static_cast<const std::shared_ptr<StreamBacklog>*>(stream))->waiting();
}

EXPORT void pytriton_guard_wake_below(void* stream, uint64_t bytes, int event_fd) {
  (*static_cast<std::shared_ptr<StreamBacklog>*>(stream))->WakeBelow(bytes, event_fd);
}

EXPORT void pytriton_guard_drop_stream(void* stream) {
  delete static_cast<std::shared_ptr<StreamBacklog>*>(stream);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerDelete(TRITONSERVER_Server* server) {
  const auto next = NEXT(TRITONSERVER_ServerDelete);
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr) front_end->OnServerEnd();
  if (Guard* guard = Active(); guard != nullptr) {
    const std::unique_lock<std::shared_mutex> lock(guard->server.mutex);
    guard->server.server = nullptr;
  }
  return next(server);
}

EXPORT int shm_open(const char* name, int flags, mode_t mode) {
  const auto next = NEXT(shm_open);
  Guard* guard = Active();
  if (guard != nullptr && IsInProgram(__builtin_return_address(0))) {
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
    // A file that no region can be made of, since it was not opened here; so `mmap` is tried as well, and nothing stays.
    const int file = static_cast<int>(syscall(SYS_memfd_create, "pytriton-self-test", 1 /* MFD_CLOEXEC */));
    (void)!ftruncate(file, kTriedBytes);
    return file;
  }
  return t_shared_file = next(name, flags, mode);
}

// The front ends map the shared memory of callers and nothing else: for a second region of one file with the number that its
// descriptor had before it was closed, which may be that of any other file by now.
EXPORT void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  const auto next = NEXT(mmap);
  if (fd < 0 || (flags & MAP_TYPE) != MAP_SHARED || Active() == nullptr || !IsInProgram(__builtin_return_address(0))) {
    return next(address, length, protection, flags, fd, offset);
  }
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

EXPORT int munmap(void* address, size_t length) {
  const auto next = NEXT(munmap);
  if (Active() != nullptr && IsInProgram(__builtin_return_address(0))) RemoveSharedMapping(address, length);
  return next(address, length);
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output* output, void** buffer, const uint64_t size,
                                                      int* memory_type, int64_t* memory_type_id) {
  const auto next = NEXT(TRITONBACKEND_OutputBuffer);
  TRITONSERVER_Error* const error = next(output, buffer, size, memory_type, memory_type_id);
  if (error != nullptr || Active() == nullptr) return error;
  const std::string problem = CheckSharedMemory(*buffer, size);
  return problem.empty() ? nullptr : Error(kInvalidArgument, "an output " + problem);
}

// The first that the thread of an instance does.
EXPORT int setpriority(__priority_which_t which, id_t who, int priority) {
  const auto next = NEXT(setpriority);
  if (Active() != nullptr && which == PRIO_PROCESS && who == static_cast<id_t>(syscall(SYS_gettid))) {
    AddInstanceThread();
    Reach(Protection::kInstances);
  }
  return next(which, who, priority);
}

EXPORT int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  const auto next = NEXT(pthread_create);
  if (next == nullptr) return EAGAIN;
  if (Active() == nullptr || argument == nullptr || !IsStandardLibrary(__builtin_return_address(0))) {
    return next(thread, attributes, run, argument);
  }
  Reach(Protection::kModelDeletion);
  if (!DeletesModel(argument)) return next(thread, attributes, run, argument);
  auto deletion = std::make_unique<Thread>(Thread{run, argument});
  const int error = next(thread, attributes, RunDeletion, deletion.get());
  if (error == 0) deletion.release();
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestNew(TRITONSERVER_InferenceRequest** request,
                                                            TRITONSERVER_Server* server, const char* model,
                                                            int64_t version) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestNew);
  TRITONSERVER_Error* const error = next(request, server, model, version);
  t_inputs.Begin(error == nullptr ? *request : nullptr);
  Guard* guard = Active();
  if (guard != nullptr && error == nullptr) guard->outcomes.Learn(model);
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest* request) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestDelete);
  Guard* guard = Active();
  if (guard != nullptr) {
    Reach(Protection::kRequestEnds);
    guard->inputs.Release(large_requests().Remove(request));
    guard->callers.OnDelete(request);
  }
  if (t_inputs.request == request) t_inputs.Begin(nullptr);
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr) front_end->forwarded().OnDelete(request);
  return next(request);
}

// A classification of texts divides by it in servers up to 2.58.
EXPORT uint32_t TRITONSERVER_DataTypeByteSize(int data_type) {
  const auto next = NEXT(TRITONSERVER_DataTypeByteSize);
  const uint32_t size = next(data_type);
  if (Active() == nullptr || !IsInProgram(__builtin_return_address(0))) return size;
  Reach(Protection::kClassification);
  return size == 0 && data_type == kTypeBytes ? 1 : size;
}

// Each name once: the server leaks a little for every further time.
EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddRequestedOutput(TRITONSERVER_InferenceRequest* request,
                                                                           const char* name) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestAddRequestedOutput);
  if (Active() != nullptr && name != nullptr) {
    Reach(Protection::kRequestedOutputs);
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
  const auto next = NEXT(TRITONSERVER_InferenceRequestAppendInputData);
  if (Active() != nullptr) {
    Reach(Protection::kInputData);
    if (size > kMostMemory) return Error(kInvalidArgument, "input '" + NameText(name) + "' is said to have " + Bytes(size));
    const std::string problem = CheckSharedMemory(base, size);
    if (!problem.empty()) return Error(kInvalidArgument, "input '" + NameText(name) + "' " + problem);
  }
  return next(request, name, base, size, memory_type, memory_type_id);
}

// As above, for what comes over gRPC.
EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(
    TRITONSERVER_InferenceRequest* request, const char* name, const void* base,
    TRITONSERVER_BufferAttributes* attributes) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes);
  size_t size = 0;
  if (Active() != nullptr) Reach(Protection::kInputData);
  if (Active() != nullptr && g_triton.byte_size != nullptr && g_triton.byte_size(attributes, &size) == nullptr) {
    const std::string problem = CheckSharedMemory(base, size);
    if (!problem.empty()) return Error(kInvalidArgument, "input '" + NameText(name) + "' " + problem);
  }
  return next(request, name, base, attributes);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetByteSize(TRITONSERVER_BufferAttributes* attributes,
                                                                    size_t size) {
  const auto next = NEXT(TRITONSERVER_BufferAttributesSetByteSize);
  if (Active() != nullptr && size > kMostMemory) {
    return Error(kInvalidArgument, "a tensor is said to have " + Bytes(size));
  }
  return next(attributes, size);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddInput(TRITONSERVER_InferenceRequest* request,
                                                                 const char* name, int data_type, const int64_t* shape,
                                                                 uint64_t dims_count) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestAddInput);
  Guard* guard = Active();
  if (guard != nullptr) {
    Reach(Protection::kShapes);
    int code = 0;
    const std::string problem = CheckInput(guard, request, name, data_type, shape, dims_count, &code);
    if (!problem.empty()) return Error(code, problem);
  }
  return next(request, name, data_type, shape, dims_count);
}

}  // extern "C"
