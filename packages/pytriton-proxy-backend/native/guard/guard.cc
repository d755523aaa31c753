// A library that is loaded into tritonserver before its own libraries (LD_PRELOAD). This file is the table of the
// functions that it interposes: which part of the guard needs each of them, and whose calls were read and tried. In any
// other program the functions only call the originals. They do so in children of the server as well, which have copies
// of its descriptors, but not its callers.
//
// function                          for              whose calls               checked against
// readv                             refuse           libevhtp, libevent        libevhtp 1.2.18, libevent 2.1.12
// writev                            answers          libevent                  libevent 2.1.12
// inflate                           refuse           Triton's HTTP front end   tritonserver 2.51
// shm_open, mmap, munmap            refuse           Triton's front ends       tritonserver 2.51
// accept, accept4                   all              libevent, gRPC            libevent 2.1.12, tritonserver 2.51
// close                             all              libevent, gRPC            libevent 2.1.12, tritonserver 2.51
// bind, listen, shutdown            handover         libevent, gRPC            libevent 2.1.12, tritonserver 2.51
// sendmsg, recvmsg                  handover         gRPC                      tritonserver 2.51
// epoll_ctl, epoll_wait, syscall    frontend         libevent                  libevent 2.1.12
// ioctl                             frontend         libevhtp                  libevhtp 1.2.18
// socketpair, send, recv            workarounds      libevhtp                  libevhtp 1.2.18
// signal                            workarounds      tritonserver              tritonserver 2.51
// setpriority, pthread_create       workarounds      tritonserver              tritonserver 2.51 to 2.68
// TRITONSERVER_..., TRITONBACKEND_  see each         front ends, backends      tritonserver 2.44 to 2.71
//
// `tests/guard` tries all of them with the installed server. docs/servers.md lists the versions that were tried.

#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>

#include "../grpc/front_end.h"
#include "answers/stream_backlog.h"
#include "answers/watched.h"
#include "frontend/callers.h"
#include "frontend/epoll.h"
#include "frontend/spread.h"
#include "handover/goodbye.h"
#include "hooks.h"
#include "in_force.h"
#include "protections.h"
#include "refuse/compressed.h"
#include "refuse/held_back.h"
#include "refuse/http_requests.h"
#include "refuse/inputs.h"
#include "refuse/shared_mappings.h"
#include "refuse/shared_memory.h"
#include "answers/responses.h"
#include "sockets.h"
#include "startup.h"
#include "workarounds/crash.h"
#include "workarounds/http_deferrals.h"
#include "workarounds/instance_threads.h"

using namespace pytriton::guard;
namespace grpc = pytriton::grpc;

extern "C" {

#define EXPORT __attribute__((visibility("default")))

// --- refuse ----------------------------------------------------------------------------------------------------------

EXPORT ssize_t readv(int fd, const iovec* parts, int count) { return ReadHttp(fd, parts, count); }

EXPORT int inflate(z_stream_s* stream, int flush) {
  const auto next = NEXT(inflate);
  if (next == nullptr) return -2;  // Z_STREAM_ERROR
  return IsInProgram(__builtin_return_address(0)) ? Inflate(stream, flush, next) : next(stream, flush);
}

EXPORT int shm_open(const char* name, int flags, mode_t mode) {
  return OpenSharedMemory(name, flags, mode, IsInProgram(__builtin_return_address(0)));
}

// The front ends map nothing but the shared memory of callers. For a second region of one file they use the number of a
// descriptor that they have closed, which may be that of any other file by now.
EXPORT void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  const auto next = NEXT(mmap);
  if (fd < 0 || (flags & MAP_TYPE) != MAP_SHARED || Active() == nullptr || !IsInProgram(__builtin_return_address(0))) {
    return next(address, length, protection, flags, fd, offset);
  }
  return MapSharedMemory(address, length, protection, flags, fd, offset);
}

EXPORT int munmap(void* address, size_t length) {
  const auto next = NEXT(munmap);
  if (Active() != nullptr && IsInProgram(__builtin_return_address(0))) RemoveSharedMapping(address, length);
  return next(address, length);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddInput(TRITONSERVER_InferenceRequest* request,
                                                                 const char* name, int data_type, const int64_t* shape,
                                                                 uint64_t dims_count) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestAddInput);
  TRITONSERVER_Error* const error = CheckInput(request, name, data_type, shape, dims_count);
  if (error != nullptr) return error;
  NoteSamples(request, shape, dims_count);
  return next(request, name, data_type, shape, dims_count);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputData(TRITONSERVER_InferenceRequest* request,
                                                                        const char* name, const void* base,
                                                                        size_t size, int memory_type,
                                                                        int64_t memory_type_id) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestAppendInputData);
  TRITONSERVER_Error* const error = CheckInputData(name, base, size);
  return error != nullptr ? error : next(request, name, base, size, memory_type, memory_type_id);
}

// The same check for inputs that come over gRPC.
EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(
    TRITONSERVER_InferenceRequest* request, const char* name, const void* base,
    TRITONSERVER_BufferAttributes* attributes) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes);
  TRITONSERVER_Error* const error = CheckInputData(name, base, attributes);
  return error != nullptr ? error : next(request, name, base, attributes);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetByteSize(TRITONSERVER_BufferAttributes* attributes,
                                                                    size_t size) {
  const auto next = NEXT(TRITONSERVER_BufferAttributesSetByteSize);
  TRITONSERVER_Error* const error = CheckTensorBytes(size);
  return error != nullptr ? error : next(attributes, size);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddRequestedOutput(TRITONSERVER_InferenceRequest* request,
                                                                           const char* name) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestAddRequestedOutput);
  TRITONSERVER_Error* const error = CheckRequestedOutput(request, name);
  return error != nullptr ? error : next(request, name);
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output* output, void** buffer, const uint64_t size,
                                                      int* memory_type, int64_t* memory_type_id) {
  const auto next = NEXT(TRITONBACKEND_OutputBuffer);
  TRITONSERVER_Error* const error = next(output, buffer, size, memory_type, memory_type_id);
  return error != nullptr ? error : CheckOutputBuffer(*buffer, size);
}

// Servers up to 2.58 divide by this size when they classify texts.
EXPORT uint32_t TRITONSERVER_DataTypeByteSize(int data_type) {
  const auto next = NEXT(TRITONSERVER_DataTypeByteSize);
  const uint32_t size = next(data_type);
  return Active() != nullptr && IsInProgram(__builtin_return_address(0)) ? ElementSize(data_type, size) : size;
}

// --- the life of a request: refuse counts its memory, frontend knows its caller, answers how it ends -------------------

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestNew(TRITONSERVER_InferenceRequest** request,
                                                            TRITONSERVER_Server* server, const char* model,
                                                            int64_t version) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestNew);
  TRITONSERVER_Error* const refusal = CheckEnding();
  if (refusal != nullptr) return refusal;
  TRITONSERVER_Error* const error = next(request, server, model, version);
  OnRequestMade(error == nullptr ? *request : nullptr);
  Guard* guard = Active();
  if (guard != nullptr && error == nullptr) guard->outcomes.Learn(model);
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest* request) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestDelete);
  OnRequestDeleted(request);
  OnCallerRequestDeleted(request);
  return next(request);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerInferAsync(TRITONSERVER_Server* server,
                                                         TRITONSERVER_InferenceRequest* request, void* trace) {
  const auto next = NEXT(TRITONSERVER_ServerInferAsync);
  const uint64_t decompressed = ClaimDecompressed(request);
  const int connection = BeginSubmission(request);
  TRITONSERVER_Error* const error = SubmitWatched(next, server, request, trace);
  EndSubmission(request, connection, error == nullptr);
  if (error != nullptr) CountLeak(decompressed);
  return error;
}

EXPORT TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetResponseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_ResponseAllocator* allocator, void* allocator_user,
    void (*on_response)(TRITONSERVER_InferenceResponse*, uint32_t, void*), void* user) {
  const auto next = NEXT(TRITONSERVER_InferenceRequestSetResponseCallback);
  // The guard's own front end for gRPC reports by itself how a request ends.
  return Active() != nullptr && IsInProgram(__builtin_return_address(0))
             ? WatchResponses(next, request, allocator, allocator_user, on_response, user)
             : next(request, allocator, allocator_user, on_response, user);
}

EXPORT ssize_t writev(int fd, const iovec* parts, int count) { return WriteHttp(fd, parts, count); }

// The front end for gRPC sets such a parameter on each request that it hands on, to find the request again.
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

// --- handover ----------------------------------------------------------------------------------------------------------

// No program that the server starts inherits a connection. A program that outlives the server, such as a stub of the
// Python backend or a process that its model has started, would keep the connection open, and its caller would wait for
// an answer that never comes.
EXPORT int accept4(int listener, sockaddr* address, socklen_t* length, int flags) {
  return Accept(listener, address, length, flags | SOCK_CLOEXEC);
}

EXPORT int accept(int listener, sockaddr* address, socklen_t* length) {
  return Accept(listener, address, length, SOCK_CLOEXEC);
}

EXPORT int bind(int fd, const sockaddr* address, socklen_t length) noexcept { return Bind(fd, address, length); }

EXPORT int listen(int fd, int backlog) noexcept { return Listen(fd, backlog); }

EXPORT int shutdown(int fd, int how) noexcept { return Shutdown(fd, how); }

EXPORT int close(int fd) { return Close(fd); }

EXPORT ssize_t sendmsg(int fd, const msghdr* message, int flags) { return SendGrpc(fd, message, flags); }

EXPORT ssize_t recvmsg(int fd, msghdr* message, int flags) { return ReceiveGrpc(fd, message, flags); }

// --- frontend ----------------------------------------------------------------------------------------------------------

EXPORT int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  return ControlEpoll(epoll, operation, fd, event);
}

EXPORT int epoll_wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  return WaitAtEpoll(epoll, events, most, timeout_ms);
}

// The server has functions for epoll of its own (libevent 2.1.12), which call this one.
EXPORT long syscall(long number, ...) noexcept {
  const auto next = NEXT(syscall);
  // Always reads the most arguments that a system call has. The kernel ignores those that the caller has not given.
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
  if (request == FIONREAD) {
    auto* const bytes = static_cast<int*>(argument);
    if (AnswerPipe(fd, bytes) || (t_reads_http && CountReadable(fd, bytes))) return 0;
  }
  return next(fd, request, argument);
}

// --- workarounds -------------------------------------------------------------------------------------------------------

// Only sockets of the server's own code are deferred, because other code may read its sockets in other ways.
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

// The server's own handlers of crashes may never end.
EXPORT sighandler_t signal(int number, sighandler_t handler) noexcept {
  const auto next = NEXT(signal);
  if (Active() != nullptr && IsCrash(number) && IsInProgram(__builtin_return_address(0))) {
    Reach(Protection::kCrashes);
    return SIG_DFL;
  }
  return next(number, handler);
}

// The thread of an instance calls this before anything else.
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
  return CreateThread(next, thread, attributes, run, argument);
}

// Load balancers ask this. The proxy backend asks it as well, for calls of callables, which wait for a worker.
EXPORT TRITONSERVER_Error* TRITONSERVER_ServerIsReady(TRITONSERVER_Server* server, bool* ready) {
  const auto next = NEXT(TRITONSERVER_ServerIsReady);
  TRITONSERVER_Error* const error = next(server, ready);
  Guard* guard = Active();
  if (guard != nullptr && error == nullptr && *ready) *ready = !guard->models.IsAnyForsaken();
  return error;
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

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetStrictReadiness(void* options, bool strict) {
  const auto next = NEXT(TRITONSERVER_ServerOptionsSetStrictReadiness);
  if (Guard* guard = Active(); guard != nullptr) guard->models.SetStrict(strict);
  return next(options, strict);
}

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerOptionsSetLogFile(void* options, const char* file) {
  const auto next = NEXT(TRITONSERVER_ServerOptionsSetLogFile);
  TRITONSERVER_Error* const error = next(options, file);
  if (Guard* guard = Active(); guard != nullptr && error == nullptr) guard->log_file.OnOpened(file);
  return error;
}

// --- the life of the server --------------------------------------------------------------------------------------------

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

EXPORT TRITONSERVER_Error* TRITONSERVER_ServerDelete(TRITONSERVER_Server* server) {
  const auto next = NEXT(TRITONSERVER_ServerDelete);
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr) front_end->OnServerEnd();
  if (Guard* guard = Active(); guard != nullptr) {
    const std::unique_lock<std::shared_mutex> lock(guard->server.mutex);
    guard->server.server = nullptr;
  }
  return next(server);
}

// Clients that wait for their model ask for its configuration. A client that has misspelt the name learns so without a
// long wait.
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

// --- for the proxy backend, see `guard_readiness.h` there -----------------------------------------------------------------

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

// Between these two calls, responses that this thread sends to streams over gRPC are written together.
EXPORT void pytriton_guard_begin_responses() { grpc::WrittenTogether::Begin(); }

EXPORT void pytriton_guard_end_responses() { grpc::WrittenTogether::End(); }

EXPORT void* pytriton_guard_take_stream() {
  auto stream = GivenResponse::TakeStream();
  return stream == nullptr ? nullptr : new std::shared_ptr<StreamBacklog>(std::move(stream));
}

EXPORT uint64_t pytriton_guard_stream_waiting(const void* stream) {
  return (*static_cast<const std::shared_ptr<StreamBacklog>*>(stream))->waiting();
}

EXPORT uint64_t pytriton_guard_stream_taken_bytes(void* stream) {
  return (*static_cast<std::shared_ptr<StreamBacklog>*>(stream))->SeeTaken();
}

EXPORT void pytriton_guard_wake_below(void* stream, uint64_t bytes, int event_fd) {
  (*static_cast<std::shared_ptr<StreamBacklog>*>(stream))->WakeBelow(bytes, event_fd);
}

EXPORT void pytriton_guard_drop_stream(void* stream) {
  delete static_cast<std::shared_ptr<StreamBacklog>*>(stream);
}

}  // extern "C"
