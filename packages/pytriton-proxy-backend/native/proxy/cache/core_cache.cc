#include "core_cache.h"

#include <link.h>

#include <cstring>

#include "../text/json_reader.h"
#include "../triton/triton_util.h"

namespace pytriton {

namespace {

// Whether the process has loaded a cache library of Triton, which it does if its command line configures a cache.
bool HasCoreCache() {
  const auto visit = [](dl_phdr_info* library, size_t, void*) {
    return library->dlpi_name != nullptr && std::strstr(library->dlpi_name, "/libtritoncache_") != nullptr ? 1 : 0;
  };
  return dl_iterate_phdr(visit, nullptr) != 0;
}

}  // namespace

TRITONSERVER_Error* RefuseCoreCache(
    const std::string& model, const std::string& configuration, const std::string& remedy) {
  if (JsonMember(JsonMember(configuration, "response_cache"), "enable") != "true" || !HasCoreCache()) return nullptr;
  return MakeError(
      TRITONSERVER_ERROR_INVALID_ARG,
      "model '" + model + "': its configuration has response_cache { enable: true } and this server a cache. Triton's "
          "cache answers failed requests with empty successes, and requests of other shapes, parameters or outputs with "
          "what others have asked for. Remove that from the configuration; " + remedy);
}

}  // namespace pytriton
