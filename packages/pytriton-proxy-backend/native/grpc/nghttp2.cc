#include "nghttp2.h"

#include <dlfcn.h>

#include <string>

namespace pytriton::grpc::nghttp2 {

namespace {

constexpr char kLibrary[] = "libnghttp2.so.14";

// This function came with 1.57, and was added to older versions by security updates.
constexpr const char* kResetRateLimit = "option_set_stream_reset_rate_limit";

// The order is that of the members of `Api`, which are all pointers to functions.
constexpr const char* kNames[] = {
    "session_callbacks_new",
    "session_callbacks_del",
    "session_callbacks_set_on_begin_headers_callback",
    "session_callbacks_set_on_header_callback",
    "session_callbacks_set_on_frame_recv_callback",
    "session_callbacks_set_on_data_chunk_recv_callback",
    "session_callbacks_set_on_stream_close_callback",
    "session_callbacks_set_send_data_callback",
    "session_callbacks_set_data_source_read_length_callback",
    "option_new",
    "option_del",
    "option_set_no_closed_streams",
    kResetRateLimit,
    "session_server_new2",
    "session_client_new2",
    "session_del",
    "session_mem_recv",
    "session_mem_send",
    "session_want_read",
    "session_want_write",
    "session_resume_data",
    "session_set_local_window_size",
    "session_terminate_session",
    "session_get_last_proc_stream_id",
    "submit_settings",
    "submit_response",
    "submit_request",
    "submit_trailer",
    "submit_rst_stream",
    "submit_goaway",
    "submit_shutdown_notice",
    "submit_ping",
};
constexpr size_t kCount = sizeof(kNames) / sizeof(kNames[0]);
static_assert(sizeof(Api) == kCount * sizeof(void*), "a name for each function");

// Fills the table from the libraries that are loaded, or from `library`. Returns false if a function is missing.
bool Fill(void* library, Api* api) {
  void* found[kCount];
  for (size_t i = 0; i < kCount; ++i) {
    found[i] = dlsym(library, (std::string("nghttp2_") + kNames[i]).c_str());
    if (found[i] == nullptr && kNames[i] != kResetRateLimit) return false;
  }
  __builtin_memcpy(api, found, sizeof(found));
  return true;
}

}  // namespace

const Api* Get() {
  static const Api* const api = []() -> const Api* {
    static Api table;
    if (Fill(RTLD_DEFAULT, &table)) return &table;
    void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    return library != nullptr && Fill(library, &table) ? &table : nullptr;
  }();
  return api;
}

}  // namespace pytriton::grpc::nghttp2
