// Written by `python3 tools/dev.py reference` from the Python settings. Change that, not this file.
#pragma once

#include <cstdint>
#include <string>

namespace pytriton {

constexpr char kSettingsFormat[] = "1";

// What is not set is 0 or empty.
struct Settings {
  // path of the unix socket that the proxy will listen on, at most 107 bytes
  std::string endpoint;
  // how long a request waits where no worker is attached, in milliseconds
  uint64_t attach_timeout_ms = 10000u;
  // shared memory per direction and worker, in bytes
  uint64_t arena_budget_bytes = 4294967296u;
  // how long memory beyond the first MiB is kept unused, in milliseconds
  uint64_t arena_idle_ms = 10000u;
  // how long a worker may take for a batch, or for the next response of a stream, in milliseconds; 0: as long as it likes
  uint64_t execution_timeout_ms = 0u;
  // whether the requests of a worker that was lost before it answered may go to another one, once
  bool repeatable = false;
  // whether tensors have a batch axis in front
  bool batching = true;
  // whether a request may get any number of responses
  bool decoupled = false;
  // how many requests wait for a worker outside of Triton's queue, which may have a limit and takes what is beyond; 0: any number
  uint64_t max_waiting = 0u;
  // what answers that are given again to the same requests may take in memory, in bytes, together with those of other models of the same library; 0: none is
  uint64_t cache_bytes = 0u;
  // how many bytes of a stream may wait for its caller, each response counting 1 KiB at least, before its callable is not asked for more; 0: any number
  uint64_t stream_backlog_bytes = 4194304u;
  // how long a caller may take less than a sixteenth of that (256 KiB at most) of a stream that waits for it, in milliseconds; then the stream ends with an error; 0: as long as it stays connected
  uint64_t stream_stall_timeout_ms = 60000u;
  // whether no worker reads the parameters of requests, so that a name in a request to `generate` that is no input is a mistake
  bool ignores_parameters = false;
  // what a batch may cost, where requests of different shapes share one: the elements that the free dimensions of its costliest input take, padded or packed; 0: the shapes of a batch are equal, and nothing is counted
  uint64_t cost_limit = 0u;
  // what each batch costs by itself, against padding; 0: as much as is measured
  uint64_t cost_overhead = 0u;
  // whether inputs are packed, so that the sizes of rows are added up, and not padded
  bool cost_packed = false;
  // whether a request that costs more than `cost_limit` is served alone, and not refused
  bool cost_alone = false;
  // which inputs have the same free dimensions within each request, which is refused otherwise: a bit for each input in the order of the model's configuration
  uint64_t cost_alike = 0u;
  // digest of the model's tensors, `ModelSpec.tensors_digest`; workers that say another one are refused
  std::string tensors_digest;
};

struct NumberSetting {
  const char* key;
  uint64_t Settings::*value;
  uint64_t minimum;
  uint64_t maximum;
  const char* expected;
};

struct SwitchSetting {
  const char* key;
  bool Settings::*value;
};

struct TextSetting {
  const char* key;
  std::string Settings::*value;
  bool (*is_valid)(const std::string& text);
  const char* expected;
};

bool IsAbsolutePath(const std::string& text);
bool IsHexadecimal(const std::string& text);

constexpr NumberSetting kNumberSettings[] = {
    {"attach_timeout_ms", &Settings::attach_timeout_ms, 0u, 9000000000000u, "a whole number up to 9000000000000"},
    {"arena_budget_bytes", &Settings::arena_budget_bytes, 1u, 18446744073709551615u, "a whole number above 0"},
    {"arena_idle_ms", &Settings::arena_idle_ms, 0u, 9000000000000u, "a whole number up to 9000000000000"},
    {"execution_timeout_ms", &Settings::execution_timeout_ms, 0u, 9000000000000u, "a whole number up to 9000000000000"},
    {"max_waiting", &Settings::max_waiting, 0u, 18446744073709551615u, "a whole number"},
    {"cache_bytes", &Settings::cache_bytes, 0u, 18446744073709551615u, "a whole number"},
    {"stream_backlog_bytes", &Settings::stream_backlog_bytes, 0u, 18446744073709551615u, "a whole number"},
    {"stream_stall_timeout_ms", &Settings::stream_stall_timeout_ms, 0u, 9000000000000u, "a whole number up to 9000000000000"},
    {"cost_limit", &Settings::cost_limit, 0u, 18446744073709551615u, "a whole number"},
    {"cost_overhead", &Settings::cost_overhead, 0u, 18446744073709551615u, "a whole number"},
    {"cost_alike", &Settings::cost_alike, 0u, 18446744073709551615u, "a whole number"},
};

constexpr SwitchSetting kSwitchSettings[] = {
    {"repeatable", &Settings::repeatable},
    {"batching", &Settings::batching},
    {"decoupled", &Settings::decoupled},
    {"ignores_parameters", &Settings::ignores_parameters},
    {"cost_packed", &Settings::cost_packed},
    {"cost_alone", &Settings::cost_alone},
};

constexpr TextSetting kTextSettings[] = {
    {"endpoint", &Settings::endpoint, IsAbsolutePath, "an absolute path"},
    {"tensors_digest", &Settings::tensors_digest, IsHexadecimal, "hexadecimal digits"},
};

}  // namespace pytriton
