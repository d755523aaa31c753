#include "tls.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pytriton::grpc {

namespace {

constexpr int kFileTypePem = 1;              // SSL_FILETYPE_PEM
constexpr int kControlMode = 33;             // SSL_CTRL_MODE
constexpr long kModes = 0x1 | 0x2 | 0x10;    // PARTIAL_WRITE, ACCEPT_MOVING_WRITE_BUFFER, RELEASE_BUFFERS
constexpr int kControlMinVersion = 123;      // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr long kTls12 = 0x0303;
constexpr int kVerifyPeerAlways = 0x1 | 0x2;  // SSL_VERIFY_PEER, FAIL_IF_NO_PEER_CERT
constexpr int kErrorWantRead = 2;
constexpr int kErrorWantWrite = 3;
constexpr int kErrorZeroReturn = 6;
constexpr int kAlpnOk = 0;           // SSL_TLSEXT_ERR_OK
constexpr int kAlpnFatal = 2;        // SSL_TLSEXT_ERR_ALERT_FATAL

using AlpnSelect = int (*)(void* ssl, const unsigned char** out, unsigned char* out_size, const unsigned char* in,
                           unsigned in_size, void* argument);

// The functions of OpenSSL that are used. Their names are `SSL_` and the names of the members.
struct Api {
  const void* (*TLS_server_method)();
  void* (*SSL_CTX_new)(const void*);
  void (*SSL_CTX_free)(void*);
  long (*SSL_CTX_ctrl)(void*, int, long, void*);
  int (*SSL_CTX_use_certificate_chain_file)(void*, const char*);
  int (*SSL_CTX_use_PrivateKey_file)(void*, const char*, int);
  int (*SSL_CTX_check_private_key)(const void*);
  int (*SSL_CTX_load_verify_locations)(void*, const char*, const char*);
  void (*SSL_CTX_set_verify)(void*, int, void*);
  void (*SSL_CTX_set_alpn_select_cb)(void*, AlpnSelect, void*);
  void* (*SSL_new)(void*);
  void (*SSL_free)(void*);
  int (*SSL_set_fd)(void*, int);
  void (*SSL_set_accept_state)(void*);
  int (*SSL_read)(void*, void*, int);
  int (*SSL_write)(void*, const void*, int);
  int (*SSL_pending)(const void*);
  int (*SSL_shutdown)(void*);
  int (*SSL_get_error)(const void*, int);
  void (*ERR_clear_error)();
  unsigned long (*ERR_get_error)();
  void (*ERR_error_string_n)(unsigned long, char*, size_t);
};

const Api* FindApi() {
  static const Api* const api = []() -> const Api* {
    static Api found;
    bool is_complete = true;
    const auto find = [&is_complete](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(RTLD_DEFAULT, name));
      is_complete = is_complete && *function != nullptr;
    };
#define FIND(name) find(&found.name, #name)
    FIND(TLS_server_method);
    FIND(SSL_CTX_new);
    FIND(SSL_CTX_free);
    FIND(SSL_CTX_ctrl);
    FIND(SSL_CTX_use_certificate_chain_file);
    FIND(SSL_CTX_use_PrivateKey_file);
    FIND(SSL_CTX_check_private_key);
    FIND(SSL_CTX_load_verify_locations);
    FIND(SSL_CTX_set_verify);
    FIND(SSL_CTX_set_alpn_select_cb);
    FIND(SSL_new);
    FIND(SSL_free);
    FIND(SSL_set_fd);
    FIND(SSL_set_accept_state);
    FIND(SSL_read);
    FIND(SSL_write);
    FIND(SSL_pending);
    FIND(SSL_shutdown);
    FIND(SSL_get_error);
    FIND(ERR_clear_error);
    FIND(ERR_get_error);
    FIND(ERR_error_string_n);
#undef FIND
    return is_complete ? &found : nullptr;
  }();
  return api;
}

// Chooses HTTP/2 among the protocols that the caller offers; without it the handshake fails.
int SelectHttp2(void*, const unsigned char** out, unsigned char* out_size, const unsigned char* in, unsigned in_size,
                void*) {
  for (unsigned place = 0; place < in_size; place += 1u + in[place]) {
    if (in[place] == 2 && place + 3 <= in_size && std::memcmp(in + place + 1, "h2", 2) == 0) {
      *out = in + place + 1;
      *out_size = 2;
      return kAlpnOk;
    }
  }
  return kAlpnFatal;
}

std::string LastError(const Api& api) {
  char text[256] = "unknown error";
  const unsigned long code = api.ERR_get_error();
  if (code != 0) api.ERR_error_string_n(code, text, sizeof(text));
  return text;
}

}  // namespace

std::unique_ptr<TlsContext> TlsContext::Make(const TlsFiles& files, std::string* error) {
  const Api* const api = FindApi();
  if (api == nullptr) {
    *error = "the server has not loaded OpenSSL";
    return nullptr;
  }
  api->ERR_clear_error();
  void* const context = api->SSL_CTX_new(api->TLS_server_method());
  if (context == nullptr) {
    *error = LastError(*api);
    return nullptr;
  }
  api->SSL_CTX_ctrl(context, kControlMode, kModes, nullptr);
  api->SSL_CTX_ctrl(context, kControlMinVersion, kTls12, nullptr);
  api->SSL_CTX_set_alpn_select_cb(context, SelectHttp2, nullptr);
  if (api->SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) != 1 ||
      api->SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), kFileTypePem) != 1 ||
      api->SSL_CTX_check_private_key(context) != 1 ||
      (!files.root.empty() && api->SSL_CTX_load_verify_locations(context, files.root.c_str(), nullptr) != 1)) {
    *error = LastError(*api);
    api->SSL_CTX_free(context);
    return nullptr;
  }
  if (!files.root.empty()) api->SSL_CTX_set_verify(context, kVerifyPeerAlways, nullptr);
  return std::unique_ptr<TlsContext>(new TlsContext(context));
}

Socket::Socket(int fd, const TlsContext* tls) : fd_(fd) {
  if (tls == nullptr) return;
  const Api* const api = FindApi();
  ssl_ = api->SSL_new(tls->context());
  if (ssl_ == nullptr || api->SSL_set_fd(ssl_, fd) != 1) {
    // Nothing can be read afterwards, which ends the connection.
    Shutdown();
    return;
  }
  api->SSL_set_accept_state(ssl_);
}

Socket::~Socket() {
  if (ssl_ != nullptr) FindApi()->SSL_free(ssl_);
  close(fd_);
}

ssize_t Socket::Result(int result) {
  if (result > 0) return result;
  switch (FindApi()->SSL_get_error(ssl_, result)) {
    case kErrorWantRead:
    case kErrorWantWrite:
      errno = EAGAIN;
      return -1;
    case kErrorZeroReturn:
      return 0;
    default:
      errno = ECONNRESET;
      return -1;
  }
}

ssize_t Socket::Read(void* buffer, size_t size) {
  if (ssl_ == nullptr) return recv(fd_, buffer, size, MSG_DONTWAIT);
  const std::lock_guard<std::mutex> lock(mutex_);
  FindApi()->ERR_clear_error();
  return Result(FindApi()->SSL_read(ssl_, buffer, static_cast<int>(std::min<size_t>(size, 1 << 20))));
}

ssize_t Socket::Write(const iovec* parts, int count) {
  if (ssl_ == nullptr) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = static_cast<size_t>(count);
    return sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  // A record of TLS has up to 16 KiB, so small parts are sent in one record.
  char record[16 * 1024];
  size_t size = 0;
  for (int i = 0; i < count && size < sizeof(record); ++i) {
    const size_t used = std::min(parts[i].iov_len, sizeof(record) - size);
    std::memcpy(record + size, parts[i].iov_base, used);
    size += used;
  }
  FindApi()->ERR_clear_error();
  const ssize_t result = Result(FindApi()->SSL_write(ssl_, record, static_cast<int>(size)));
  if (result == 0) errno = EPIPE;
  return result == 0 ? -1 : result;
}

bool Socket::has_pending() {
  if (ssl_ == nullptr) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return FindApi()->SSL_pending(ssl_) > 0;
}

void Socket::Shutdown() {
  if (ssl_ != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    FindApi()->ERR_clear_error();
    FindApi()->SSL_shutdown(ssl_);
  }
  shutdown(fd_, SHUT_RDWR);
}

}  // namespace pytriton::grpc
