#include "refusals.h"

#include <atomic>
#include <ctime>

#include "../in_force.h"
#include "../startup.h"

namespace pytriton::guard {

// Refusals come in bursts, and a line for each would flood the log.
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

TRITONSERVER_Error* Error(int code, const std::string& text) {
  LogRefusal(text);
  return g_triton.make_error(code, text.c_str());
}

}  // namespace pytriton::guard
