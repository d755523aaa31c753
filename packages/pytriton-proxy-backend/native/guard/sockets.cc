#include "sockets.h"

#include <netinet/in.h>
#include <unistd.h>

#include <cerrno>

#include "../grpc/front_end.h"
#include "answers/responses.h"
#include "frontend/epoll.h"
#include "frontend/grpc_service.h"
#include "frontend/spread.h"
#include "hooks.h"
#include "in_force.h"
#include "protections.h"
#include "refuse/http_requests.h"
#include "workarounds/http_deferrals.h"
#include "workarounds/open_files.h"

namespace pytriton::guard {
namespace {

// Whether the connections of a listener are left to the server's successor.
bool IsHandedOver(Guard* guard, int listener) {
  return guard != nullptr && !guard->listeners.accepts() && guard->listeners.Has(listener);
}

// Whether a connection is one of the front ends. The connections of workers are unix sockets, which do not concern the
// guard.
bool IsInternet(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && (domain == AF_INET || domain == AF_INET6);
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
  std::string().swap(connection->held);
}

}  // namespace

int Accept(int listener, sockaddr* address, socklen_t* length, int flags) {
  const auto accept_one = [&] { return NEXT(accept4)(listener, address, length, flags); };
  Guard* guard = Active();
  if (IsHandedOver(guard, listener)) {
    errno = EAGAIN;
    return -1;
  }
  int fd = accept_one();
  if (guard != nullptr && fd < 0 && (errno == EMFILE || errno == ENFILE) && IsInternet(listener)) {
    TurnAway(listener, address, length, flags);
    errno = EAGAIN;
    return -1;
  }
  if (const auto* front_end = ActiveFrontEnd(); front_end != nullptr && front_end->Has(listener)) {
    // Other processes that find this port of the loopback interface must use the front end instead.
    for (; fd >= 0 && !front_end->IsOwn(fd); fd = accept_one()) close(fd);
    return fd;
  }
  if (guard != nullptr && fd >= 0 && IsInternet(fd)) {
    guard->connections.OnAccept(fd);
    ForgetInterest(fd);
    OnHttpAccepted(fd);
  }
  return fd;
}

int Bind(int fd, const sockaddr* address, socklen_t length) {
  const auto next = NEXT(bind);
  Guard* guard = Active();
  int result = 0;
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr && front_end->Bind(fd, address, length, &result)) {
    return result;
  }
  if (guard != nullptr && guard->listeners.Adopt(fd, address, length)) return 0;
  return next(fd, address, length);
}

int Listen(int fd, int backlog) {
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

// The front end for gRPC ends its listener in this way; the successor may use the same one, so it must not be shut
// down.
int Shutdown(int fd, int how) {
  const auto next = NEXT(shutdown);
  if (IsInChild()) return next(fd, how);
  Guard* guard = Active();
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr) front_end->OnClose(fd);
  return guard != nullptr && !guard->listeners.accepts() && guard->listeners.Has(fd) ? 0 : next(fd, how);
}

int Close(int fd) {
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

}  // namespace pytriton::guard
