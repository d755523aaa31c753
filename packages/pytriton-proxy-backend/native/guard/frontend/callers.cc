#include "callers.h"

#include "../../grpc/front_end.h"
#include "../in_force.h"
#include "../protections.h"
#include "../refuse/compressed.h"
#include "epoll.h"

namespace pytriton::guard {

void BeginHandling(Guard* guard, int fd) {
  t_handled = guard->connections.NameOf(fd);
  ForgetDecompressed(guard);
}

int BeginSubmission(TRITONSERVER_InferenceRequest* request) {
  Guard* const guard = Active();
  if (guard == nullptr) return -1;
  const int connection = HandledConnection(guard);
  t_handled = {};
  if (connection < 0) return -1;
  guard->callers.OnSubmit(request, connection);
  guard->connections.SetRequest(connection, request);
  return connection;
}

void EndSubmission(TRITONSERVER_InferenceRequest* request, int connection, bool is_submitted) {
  if (Guard* const guard = Active(); guard != nullptr && connection >= 0) {
    if (g_triton.cancel != nullptr && WaitsHere()) Reach(Protection::kHttpCallers);
    if (is_submitted) guard->callers.OnSubmitted(request, connection);
  }
  grpc::FrontEnd* const front_end = ActiveFrontEnd();
  if (front_end != nullptr && is_submitted) front_end->forwarded().OnSubmitted(request);
}

void OnCallerRequestDeleted(const TRITONSERVER_InferenceRequest* request) {
  if (Guard* const guard = Active(); guard != nullptr) guard->callers.OnDelete(request);
  if (grpc::FrontEnd* front_end = ActiveFrontEnd(); front_end != nullptr) front_end->forwarded().OnDelete(request);
}

}  // namespace pytriton::guard
