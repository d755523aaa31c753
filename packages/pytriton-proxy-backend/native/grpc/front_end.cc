#include "front_end.h"

#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace pytriton::grpc {

namespace {

// How long an unanswered probe of the system may take, as in Triton's own front end. The first probe comes after a
// minute of silence here, and after two hours there.
constexpr int kKeepaliveTimeoutMs = 20'000;
constexpr auto kRolePause = std::chrono::milliseconds(20);
constexpr auto kShortagePause = std::chrono::milliseconds(100);
// How long a server that was replaced waits for clients that have not closed their connections.
constexpr auto kGoodbyeTime = std::chrono::seconds(2);
constexpr auto kGoodbyePause = std::chrono::milliseconds(5);

// The arguments of the server, `--name=value` or `--name value`.
class Arguments {
 public:
  Arguments(int argc, char** argv) : argc_(argc), argv_(argv) {}

  std::vector<std::string> All(const std::string& name) const {
    std::vector<std::string> values;
    for (int i = 1; i < argc_; ++i) {
      const std::string argument = argv_[i];
      if (argument.compare(0, name.size() + 1, name + "=") == 0) values.push_back(argument.substr(name.size() + 1));
      if (argument == name && i + 1 < argc_) values.push_back(argv_[i + 1]);
    }
    return values;
  }
  std::string Last(const std::string& name) const {
    const auto values = All(name);
    return values.empty() ? "" : values.back();
  }
  bool IsTrue(const std::string& name) const {
    std::string text = Last(name);
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char letter) { return std::tolower(letter); });
    return text == "true" || text == "1" || text == "on";
  }
  // Whether an argument is the abbreviation of an option, which the server accepts.
  bool HasShortened(const std::string& begin, const std::vector<std::string>& known) const {
    for (int i = 1; i < argc_; ++i) {
      const std::string argument = argv_[i];
      const std::string name = argument.substr(0, argument.find('='));
      if (name.compare(0, begin.size(), begin) == 0 && std::find(known.begin(), known.end(), name) == known.end()) {
        return true;
      }
    }
    return false;
  }
  std::chrono::milliseconds Milliseconds(const std::string& name, int otherwise = 0) const {
    const std::string text = Last(name);
    return std::chrono::milliseconds(text.empty() ? otherwise : std::max(0, std::atoi(text.c_str())));
  }
  // The new texts are never freed, because they are arguments of `main` from now on.
  void Replace(const std::string& name, const std::string& other, const std::string& value) {
    for (int i = 1; i < argc_; ++i) {
      const std::string argument = argv_[i];
      if (argument.compare(0, name.size() + 1, name + "=") == 0) argv_[i] = strdup((other + "=" + value).c_str());
      if (argument == name && i + 1 < argc_) {
        argv_[i] = strdup(other.c_str());
        argv_[i + 1] = strdup(value.c_str());
      }
    }
  }

 private:
  const int argc_;
  char** const argv_;
};

int PortOf(const sockaddr* address) {
  if (address->sa_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port);
  if (address->sa_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(address)->sin6_port);
  return -1;
}

void CopyOption(int from, int to, int level, int option) {
  int value = 0;
  socklen_t size = sizeof(value);
  if (getsockopt(from, level, option, &value, &size) == 0) setsockopt(to, level, option, &value, size);
}

// Makes an address of the loopback interface with any port, for a socket of the same family as another one.
sockaddr_storage LoopbackOf(int fd, int family, socklen_t* size) {
  sockaddr_storage storage{};
  storage.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&storage)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    *size = sizeof(sockaddr_in);
    return storage;
  }
  auto* const six = reinterpret_cast<sockaddr_in6*>(&storage);
  int only = 1;
  socklen_t length = sizeof(only);
  getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, &length);
  six->sin6_addr = in6addr_loopback;
  if (only == 0) {
    // This is 127.0.0.1 as an IPv6 address; it works on machines that have no ::1.
    six->sin6_addr = in6_addr{};
    six->sin6_addr.s6_addr[10] = six->sin6_addr.s6_addr[11] = 0xff;
    six->sin6_addr.s6_addr[12] = 127;
    six->sin6_addr.s6_addr[15] = 1;
  }
  *size = sizeof(sockaddr_in6);
  return storage;
}

}  // namespace

// Accepts connections of one listener.
class FrontEnd::Acceptor : public Pollable {
 public:
  Acceptor(FrontEnd* front_end, int listener) : front_end_(front_end), listener_(listener) {}
  void OnEvents(uint32_t) override { front_end_->AcceptAll(listener_); }

 private:
  FrontEnd* const front_end_;
  const int listener_;
};

FrontEnd* FrontEnd::Make(int argc, char** argv, const Surroundings& surroundings, size_t max_message_bytes) {
  Arguments arguments(argc, argv);
  const auto refuse = [&surroundings](const std::string& reason) {
    surroundings.log('W', "The front end for gRPC is not in force: " + reason +
                              ". Callers that cancel calls over gRPC can end this server");
    return nullptr;
  };
  if (!arguments.All("--allow-grpc").empty() && !arguments.IsTrue("--allow-grpc")) return nullptr;
  if (nghttp2::Get() == nullptr) return refuse("there is no libnghttp2.so.14");
  const std::string use_tls = "--grpc-use-ssl";
  const std::string use_mutual = "--grpc-use-ssl-mutual";
  if (arguments.HasShortened("--grpc-u", {use_tls, use_mutual})) return refuse("an option of TLS is abbreviated");
  auto made = std::make_unique<FrontEnd>();
  const std::string port = arguments.Last("--grpc-port");
  if (!port.empty()) made->port_ = std::atoi(port.c_str());
  if (made->port_ <= 0) return refuse("the port has no number of its own, --grpc-port is 0");
  for (const std::string& text : arguments.All("--grpc-restricted-protocol")) {
    const size_t colon = text.find(':');
    const size_t equals = text.find('=', colon == std::string::npos ? 0 : colon);
    if (colon == std::string::npos || equals == std::string::npos) continue;  // the server reports the error
    const std::string groups = "," + text.substr(0, colon) + ",";
    if (groups.find(",inference,") == std::string::npos) continue;
    made->service_.restricted_header = std::string(kRestrictedHeader) + text.substr(colon + 1, equals - colon - 1);
    made->service_.restricted_value = text.substr(equals + 1);
  }
  const std::string compression = arguments.Last("--grpc-infer-response-compression-level");
  made->service_.forwards_headers = !arguments.Last("--grpc-header-forward-pattern").empty();
  bool forwards_all = made->service_.forwards_headers || (!compression.empty() && compression != "none");
  for (int i = 1; i < argc; ++i) forwards_all = forwards_all || std::strncmp(argv[i], "--trace-", 8) == 0;
  made->service_.forwards_all = forwards_all;
  made->service_.max_message_bytes = std::min<size_t>(max_message_bytes, INT32_MAX);
  made->service_.limits = {arguments.Milliseconds("--grpc-keepalive-time"),
                           arguments.Milliseconds("--grpc-keepalive-timeout", kKeepaliveTimeoutMs),
                           arguments.IsTrue("--grpc-keepalive-permit-without-calls"),
                           arguments.Milliseconds("--grpc-max-connection-age"),
                           arguments.Milliseconds("--grpc-max-connection-age-grace")};
  // The connection to Triton's own front end must live as long as the front end, because its end would crash the
  // server.
  arguments.Replace("--grpc-max-connection-age", "--grpc-max-connection-age", "0");
  arguments.Replace("--grpc-keepalive-time", "--grpc-keepalive-time", "7200000");
  made->surroundings_ = surroundings;
  // The server encrypts if the second option is given, whatever its value is.
  if (arguments.IsTrue(use_tls) || !arguments.All(use_mutual).empty()) {
    const bool is_mutual = arguments.IsTrue(use_mutual);
    std::string error;
    made->tls_ = TlsContext::Make({arguments.Last("--grpc-server-cert"), arguments.Last("--grpc-server-key"),
                                   is_mutual ? arguments.Last("--grpc-root-cert") : ""},
                                  &error);
    if (made->tls_ == nullptr) return refuse("its TLS cannot be set up: " + error);
    // OpenSSL writes without MSG_NOSIGNAL, and the caller may be gone.
    signal(SIGPIPE, SIG_IGN);
    arguments.Replace(use_tls, use_tls, "false");
    arguments.Replace(use_mutual, use_tls, "false");
  }
  // This is never freed, because its threads run until the process ends.
  return made.release();
}

// The server binds all its ports in one thread, so this needs no lock.
bool FrontEnd::StartLoops() {
  if (!loops_.empty()) return true;
  const unsigned count = std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u);
  for (unsigned i = 0; i < count; ++i) {
    auto loop = std::make_unique<Loop>();
    if (!loop->Start()) break;
    loops_.push_back(std::move(loop));
  }
  if (loops_.empty()) return false;
  inner_ = std::make_unique<Inner>(loops_.front().get());
  service_.inner = inner_.get();
  service_.forwarded = &forwarded_;
  return true;
}

bool FrontEnd::Bind(int fd, const sockaddr* address, socklen_t size, int* result) {
  int type = 0;
  socklen_t length = sizeof(type);
  if (address == nullptr || PortOf(address) != port_ || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 ||
      type != SOCK_STREAM) {
    return false;
  }
  if (!StartLoops()) {
    surroundings_.log('W', "The front end for gRPC is not in force: the system has no threads or descriptors left");
    return false;
  }
  const int own = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (own < 0) return false;
  for (const int option : {SO_REUSEADDR, SO_REUSEPORT}) CopyOption(fd, own, SOL_SOCKET, option);
  if (address->sa_family == AF_INET6) CopyOption(fd, own, IPPROTO_IPV6, IPV6_V6ONLY);
  *result = surroundings_.adopt(own, address, size) ? 0 : surroundings_.bind(own, address, size);
  if (*result == 0) {
    socklen_t inner_size = 0;
    sockaddr_storage inner = LoopbackOf(fd, address->sa_family, &inner_size);
    *result = surroundings_.bind(fd, reinterpret_cast<const sockaddr*>(&inner), inner_size);
    if (*result != 0 && address->sa_family == AF_INET6) {
      // A machine may have one of these and not the other one.
      reinterpret_cast<sockaddr_in6*>(&inner)->sin6_addr = in6addr_loopback;
      *result = surroundings_.bind(fd, reinterpret_cast<const sockaddr*>(&inner), inner_size);
    }
  }
  if (*result != 0) {
    const int error = errno;
    surroundings_.close(own);
    errno = error;
    return true;
  }
  // The lock is taken only now, because adopting a socket closes another one, which calls this object.
  const std::lock_guard<std::mutex> lock(mutex_);
  listeners_[fd].fd = own;
  return true;
}

void FrontEnd::OnListen(int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = listeners_.find(fd);
  if (found == listeners_.end() || found->second.number != 0) return;
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  inner_->SetAddress(reinterpret_cast<sockaddr*>(&address), size);
  const int own = found->second.fd;
  if (surroundings_.listen(own, SOMAXCONN) == 0) surroundings_.on_listen(own);
  found->second.number = loops_.front()->Add(own, EPOLLIN | EPOLLET, std::make_shared<Acceptor>(this, own));
  surroundings_.log('I', "The front end for gRPC serves inference at port " + std::to_string(port_) +
                             (tls_ != nullptr ? ", encrypted" : "") +
                             (service_.forwards_all ? "; every request goes on to Triton's own, for an option that it alone has" : ""));
}

bool FrontEnd::Has(int fd) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return listeners_.count(fd) > 0;
}

void FrontEnd::OnClose(int fd) {
  Listener closed;
  std::vector<std::weak_ptr<ClientConnection>> connections;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = listeners_.find(fd);
    if (found == listeners_.end()) return;
    closed = found->second;
    listeners_.erase(found);
    connections = connections_;
  }
  surroundings_.on_close(closed.fd);
  Loop* const loop = loops_.front().get();
  loop->Post([this, loop, closed] {
    loop->Remove(closed.number, closed.fd);
    surroundings_.close(closed.fd);
  });
  for (const auto& weak : connections) {
    if (const auto connection = weak.lock()) connection->SayGoodbye();
  }
}

void FrontEnd::OnServerEnd() {
  {
    const std::unique_lock<std::shared_mutex> lock(service_.server_mutex);
    service_.server.store(nullptr);
  }
  if (service_.has_left()) WaitForGoodbyes();
}

// Waits until the clients of a server that was replaced have read the goodbye and closed their connections. If the process
// ended before, the next call of such a client would fail instead of being made over another connection: many clients
// read only during a call, and writing to a connection that the other side has closed is an error that comes before
// anything is read.
void FrontEnd::WaitForGoodbyes() {
  std::vector<std::weak_ptr<ClientConnection>> connections;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    connections = connections_;
  }
  for (const auto& weak : connections) {
    if (const auto connection = weak.lock()) connection->SayGoodbye();
  }
  const auto end = Clock::now() + kGoodbyeTime;
  const auto is_open = [](const std::weak_ptr<ClientConnection>& weak) {
    const auto connection = weak.lock();
    return connection != nullptr && !connection->is_closed();
  };
  while (Clock::now() < end && std::any_of(connections.begin(), connections.end(), is_open)) {
    std::this_thread::sleep_for(kGoodbyePause);
  }
}

void FrontEnd::AcceptAll(int listener) {
  Loop* const loop = loops_.front().get();
  for (;;) {
    if (!service_.accepts()) {
      // The other server at this socket accepts connections until the roles change.
      if (waiting_.insert(listener).second) {
        loop->At(Clock::now() + kRolePause, [this, listener] {
          waiting_.erase(listener);
          AcceptAll(listener);
        });
      }
      return;
    }
    const int fd = surroundings_.accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      Serve(fd);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      loop->At(Clock::now() + kShortagePause, [this, listener] { AcceptAll(listener); });
      return;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EBADF || errno == EINVAL) {
      return;
    }
  }
}

void FrontEnd::Serve(int fd) {
  Loop* const loop = loops_[next_loop_.fetch_add(1) % loops_.size()].get();
  const auto connection = std::make_shared<ClientConnection>(&service_, loop, fd, tls_.get());
  if (!connection->Begin()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (connections_.size() >= 64 && connections_.size() == connections_.capacity()) {
    connections_.erase(std::remove_if(connections_.begin(), connections_.end(), [](const auto& weak) { return weak.expired(); }),
                       connections_.end());
  }
  connections_.push_back(connection);
}

}  // namespace pytriton::grpc
