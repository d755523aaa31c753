// Which pages of other origins may read the server's answers in a browser (CORS): those that the server's owner has
// named.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pytriton::guard {

class CorsOrigins {
 public:
  CorsOrigins() = default;
  // Origins separated by blanks, as in the variable PYTRITON_GUARD_CORS; `*` means any.
  explicit CorsOrigins(std::string_view list);

  bool is_on() const { return any_ || !origins_.empty(); }
  // Whether a page of an origin may read answers; false for "".
  bool Allows(std::string_view origin) const;
  // The headers (lines with their ends) of an answer to a request from an origin, or from none.
  std::string Headers(std::string_view origin) const;
  // The headers of the answer to a browser that asks, for a page of an origin, whether it may send a request with
  // `wanted`.
  std::string PreflightHeaders(std::string_view origin, std::string_view wanted) const;

 private:
  bool any_ = false;
  std::vector<std::string> origins_;
};

}  // namespace pytriton::guard
