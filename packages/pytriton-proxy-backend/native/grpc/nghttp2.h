// The part of libnghttp2 that is used here, declared by hand; tritonserver has already loaded the library for libcurl.
// Its ABI (soname 14) only grows. The names are those of nghttp2 without its prefix.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace pytriton::grpc::nghttp2 {

struct Session;
struct Callbacks;
struct Option;

struct NameValue {
  const uint8_t* name;
  const uint8_t* value;
  size_t name_size;
  size_t value_size;
  uint8_t flags;
};

struct SettingsEntry {
  int32_t id;
  uint32_t value;
};

struct FrameHeader {
  size_t length;
  int32_t stream_id;
  uint8_t type;
  uint8_t flags;
  uint8_t reserved;
};

// A HEADERS frame; all kinds of frames begin with the same header.
struct Frame {
  FrameHeader header;
  size_t padding;
  struct {
    int32_t stream_id;
    int32_t weight;
    uint8_t exclusive;
  } priority;
  NameValue* values;
  size_t count;
  int category;
};

union DataSource {
  int fd;
  void* pointer;
};

using DataRead = ssize_t (*)(Session*, int32_t stream, uint8_t* buffer, size_t length, uint32_t* flags, DataSource*,
                             void* user);
struct DataProvider {
  DataSource source;
  DataRead read;
};

constexpr int kErrorDeferred = -508;
constexpr int kErrorTemporaryCallback = -521;
constexpr int kErrorCallback = -902;

constexpr uint8_t kData = 0;
constexpr uint8_t kHeaders = 1;
constexpr uint8_t kGoAway = 7;
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;
constexpr uint32_t kDataEof = 1;
constexpr uint32_t kDataNoEndStream = 2;
constexpr uint32_t kDataNoCopy = 4;
constexpr uint8_t kNoIndex = 1;
constexpr int kCategoryRequest = 0;
constexpr int kCategoryResponse = 1;

constexpr int32_t kSettingsMaxConcurrentStreams = 3;
constexpr int32_t kSettingsInitialWindowSize = 4;
constexpr int32_t kSettingsMaxFrameSize = 5;
constexpr int32_t kSettingsMaxHeaderListSize = 6;

constexpr uint32_t kNoError = 0;
constexpr uint32_t kProtocolError = 1;
constexpr uint32_t kCancel = 8;
constexpr uint32_t kEnhanceYourCalm = 11;

using OnFrame = int (*)(Session*, const Frame*, void* user);
using OnHeader = int (*)(Session*, const Frame*, const uint8_t* name, size_t name_size, const uint8_t* value,
                         size_t value_size, uint8_t flags, void* user);
using OnDataChunk = int (*)(Session*, uint8_t flags, int32_t stream, const uint8_t* data, size_t size, void* user);
using OnStreamClose = int (*)(Session*, int32_t stream, uint32_t error, void* user);
using SendData = int (*)(Session*, Frame*, const uint8_t* header, size_t length, DataSource*, void* user);
using DataLength = ssize_t (*)(Session*, uint8_t type, int32_t stream, int32_t session_window, int32_t stream_window,
                               uint32_t max_frame_size, void* user);

// The functions, in the order of their names in the table in nghttp2.cc.
struct Api {
  int (*callbacks_new)(Callbacks**);
  void (*callbacks_del)(Callbacks*);
  void (*callbacks_set_on_begin_headers_callback)(Callbacks*, OnFrame);
  void (*callbacks_set_on_header_callback)(Callbacks*, OnHeader);
  void (*callbacks_set_on_frame_recv_callback)(Callbacks*, OnFrame);
  void (*callbacks_set_on_data_chunk_recv_callback)(Callbacks*, OnDataChunk);
  void (*callbacks_set_on_stream_close_callback)(Callbacks*, OnStreamClose);
  void (*callbacks_set_send_data_callback)(Callbacks*, SendData);
  void (*callbacks_set_data_source_read_length_callback)(Callbacks*, DataLength);
  int (*option_new)(Option**);
  void (*option_del)(Option*);
  void (*option_set_no_closed_streams)(Option*, int);
  // Null if the library has no limit for how often a client may reset streams.
  void (*option_set_stream_reset_rate_limit)(Option*, uint64_t burst, uint64_t rate);
  int (*server_new2)(Session**, const Callbacks*, void* user, const Option*);
  int (*client_new2)(Session**, const Callbacks*, void* user, const Option*);
  void (*del)(Session*);
  ssize_t (*mem_recv)(Session*, const uint8_t* data, size_t size);
  ssize_t (*mem_send)(Session*, const uint8_t** data);
  int (*want_read)(Session*);
  int (*want_write)(Session*);
  int (*resume_data)(Session*, int32_t stream);
  int (*set_local_window_size)(Session*, uint8_t flags, int32_t stream, int32_t size);
  int (*terminate_session)(Session*, uint32_t error);
  int32_t (*get_last_proc_stream_id)(Session*);
  int (*submit_settings)(Session*, uint8_t flags, const SettingsEntry*, size_t count);
  int (*submit_response)(Session*, int32_t stream, const NameValue*, size_t count, const DataProvider*);
  int32_t (*submit_request)(Session*, const void* priority, const NameValue*, size_t count, const DataProvider*,
                            void* stream_user);
  int (*submit_trailer)(Session*, int32_t stream, const NameValue*, size_t count);
  int (*submit_rst_stream)(Session*, uint8_t flags, int32_t stream, uint32_t error);
  int (*submit_goaway)(Session*, uint8_t flags, int32_t last_stream, uint32_t error, const uint8_t* data, size_t size);
  int (*submit_shutdown_notice)(Session*);
  int (*submit_ping)(Session*, uint8_t flags, const uint8_t* opaque);
};

// Returns null if the process has no such library and none can be loaded.
const Api* Get();

}  // namespace pytriton::grpc::nghttp2
