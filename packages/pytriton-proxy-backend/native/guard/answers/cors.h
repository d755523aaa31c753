// Which pages of other origins a browser lets read the server's answers (CORS): those that the server's owner names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pytriton::guard {

class CorsOrigins {
 public:
  CorsOrigins() = default;
  // Origins with blanks between them, as in the variable PYTRITON_GUARD_CORS; `*` is any.
  explicit CorsOrigins(std::string_view list);

  bool is_on() const { return any_ || !origins_.empty(); }
  // Whether a page of an origin may read answers. None has the empty one.
  bool Allows(std::string_view origin) const;
  // What an answer says (lines, each with its end) to a request that names an origin, or none.
  std::string Headers(std::string_view origin) const;
  // What the answer to a browser says that asks, for a page of an origin, before it sends a request with these headers.
  std::string PreflightHeaders(std::string_view origin, std::string_view wanted) const;

 private:
  bool any_ = false;
  std::vector<std::string> origins_;
};

}  // namespace pytriton::guard
