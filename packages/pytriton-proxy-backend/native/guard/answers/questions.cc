#include "questions.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <mutex>
#include <shared_mutex>
#include <vector>

#include "../hooks.h"
#include "page.h"

namespace pytriton::guard {
namespace {

constexpr uint32_t kReadyModels = 1;  // TRITONSERVER_INDEX_FLAG_READY

// Takes the text out of a message of Triton, and deletes the message.
std::string TakeText(TRITONSERVER_Message* message) {
  const char* text = nullptr;
  size_t size = 0;
  std::string taken = !IsError(g_triton.to_json(message, &text, &size)) && text != nullptr ? std::string(text, size) : "";
  IsError(g_triton.delete_message(message));
  return taken;
}

bool CanRead() { return g_triton.to_json != nullptr && g_triton.delete_message != nullptr; }

// Asks the server for something that it returns as JSON; "" if it returns an error.
template <typename Ask>
std::string AskServer(Guard* guard, const Ask& ask) {
  TRITONSERVER_Message* message = nullptr;
  {
    const std::shared_lock<std::shared_mutex> lock(guard->server.mutex);
    if (guard->server.server == nullptr) return "";
    if (IsError(ask(guard->server.server, &message))) return "";
  }
  return TakeText(message);
}

// The models that are ready.
std::vector<PageModel> ModelsOf(Guard* guard) {
  if (g_triton.index == nullptr || !CanRead() || guard->hides_models) return {};
  std::vector<PageModel> models = ReadIndex(AskServer(guard, [](TRITONSERVER_Server* server, TRITONSERVER_Message** message) {
    return g_triton.index(server, kReadyModels, message);
  }));
  for (PageModel& model : models) {
    model.interface = InterfaceOf(guard, model.name, -1);
    model.is_served = !guard->models.IsForsaken(model.name.c_str(), -1);
  }
  return models;
}

// The port at which a connection was accepted.
uint16_t PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  const bool is_six = address.ss_family == AF_INET6;
  return ntohs(is_six ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                      : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

}  // namespace

ModelInterface InterfaceOf(Guard* guard, const std::string& model, int64_t version) {
  using Ask = TRITONSERVER_Error* (*)(TRITONSERVER_Server*, const char*, int64_t, uint32_t, TRITONSERVER_Message**);
  const auto ask = reinterpret_cast<Ask>(FindNext(Hook::TRITONSERVER_ServerModelConfig));
  if (ask == nullptr || !CanRead()) return {};
  return ReadInterface(AskServer(guard, [&](TRITONSERVER_Server* server, TRITONSERVER_Message** message) {
    return ask(server, model.c_str(), version, 1, message);
  }));
}

std::unique_ptr<HttpResponse> PageFor(Guard* guard, int fd, bool is_html) {
  const uint16_t port = PortOf(fd);
  const auto texts = guard->page.Get(port, [&] {
    const std::vector<PageModel> models = ModelsOf(guard);
    // The address of this machine must not be shown to callers.
    return PageTexts{PageAsHtml(models, "http://localhost:" + std::to_string(port), guard->hides_models),
                     PageAsJson(models, guard->hides_models)};
  });
  return std::make_unique<HttpResponse>("200 OK", false, is_html ? texts->html : texts->json, PageHeaders(is_html),
                                        is_html ? "text/html; charset=utf-8" : "application/json");
}

bool HasModel(const std::string& model) {
  Guard* const guard = Active();
  if (guard == nullptr || g_triton.properties == nullptr) return false;
  const std::shared_lock<std::shared_mutex> lock(guard->server.mutex);
  if (guard->server.server == nullptr) return false;
  uint32_t flags = 0;
  return !IsError(g_triton.properties(guard->server.server, model.c_str(), -1, &flags, nullptr));
}

}  // namespace pytriton::guard
