#include "grpc_service.h"

#include <sys/socket.h>

#include "../../grpc/front_end.h"
#include "../hooks.h"
#include "../protections.h"
#include "../startup.h"

namespace pytriton::guard {

void EndListener(int fd) {
  shutdown(fd, SHUT_RDWR);
  Active()->listeners.OnClose(fd);
}

void StartFrontEnd(Guard& guard, int argc, char** argv) {
  if (guard.limits.grpc_front_end == 0 || guard.limits.frontend == 0) return;
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
  const uint64_t most = guard.limits.refuse == 0 ? UINT64_MAX : guard.limits.max_request_bytes;
  grpc::FrontEnd* const front_end = grpc::FrontEnd::Make(argc, argv, surroundings, most);
  if (front_end == nullptr) return;
  grpc::Service& service = front_end->service();
  service.reserve = [](uint64_t bytes) {
    return Refusing() == nullptr || Active()->bodies.TryReserve(bytes, Active()->limits.max_in_flight_bytes);
  };
  service.release = [](uint64_t bytes) {
    if (Refusing() != nullptr) Active()->bodies.Release(bytes);
  };
  service.on_call = [] { Reach(Protection::kGrpcCalls); };
  service.outcomes = &guard.outcomes;
  service.makes_spans = guard.makes_spans;
  service.accepts = [] { return Active()->listeners.accepts(); };
  service.has_left = [] { return Active()->listeners.has_left(); };
  g_in_force.load()->front_end.store(front_end, std::memory_order_release);
}

}  // namespace pytriton::guard
