// The side file `pytriton.conf` in a model's version folder: what the proxy must know and Triton's API does not tell.
#pragma once

#include <cstdint>
#include <string>

namespace pytriton {

constexpr char kSideFileName[] = "pytriton.conf";

struct Settings {
  std::string endpoint;  // path of the unix socket to listen on
  bool batching = true;
  bool decoupled = false;
  uint64_t attach_timeout_ms = 10000;
  uint64_t max_waiting = 0;  // how many requests may wait for a worker outside of Triton's queue; 0: any number
  uint64_t arena_budget_bytes = uint64_t{4} << 30;
  uint64_t arena_idle_ms = 10000;
  uint64_t execution_timeout_ms = 0;  // how long a worker may take for a batch; 0: as long as it likes
  std::string tensors_digest;         // of the model's tensors, for workers that say theirs; may be empty
  bool repeatable = false;            // whether what a lost worker has not answered may go to another one
};

// `text` is lines of `key = value`; `#` begins a comment line. False with the line and the reason.
bool ParseSettings(const std::string& text, Settings* settings, std::string* error);

}  // namespace pytriton
