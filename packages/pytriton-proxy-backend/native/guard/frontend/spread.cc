#include "spread.h"

#include <thread>

#include "../in_force.h"
#include "../protections.h"
#include "http_threads.h"

namespace pytriton::guard {
namespace {

// The front end's threads for which this thread accepts connections; null in other threads. They are never freed,
// because these threads never end.
thread_local HttpThreads* t_http_threads = nullptr;

}  // namespace

void OnHttpAccepted(int fd) {
  if (Active()->limits.frontend == 0) return;
  if (t_http_threads == nullptr) t_http_threads = new HttpThreads(std::thread::hardware_concurrency());
  t_http_threads->OnAccept(fd);
}

bool AnswerPipe(int fd, int* bytes) {
  if (t_http_threads == nullptr || Active() == nullptr || t_http_threads->connection() < 0) return false;
  const int connection = t_http_threads->connection();
  const auto answer = t_http_threads->Ask(fd);
  if (!answer) return false;
  Reach(Protection::kHttpThreads);
  if (answer->chosen != nullptr) Active()->connections.Assign(connection, answer->chosen);
  *bytes = answer->bytes;
  return true;
}

}  // namespace pytriton::guard
