// What a browser, or curl, gets at `/` and `/docs`: the models of the server, what they take and give, and how to ask them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "generate_errors.h"

namespace pytriton::guard {

struct PageModel {
  std::string name;
  std::vector<std::string> versions;
  bool is_served = true;  // false: no worker is attached
  ModelInterface interface;
};

// The names and versions in Triton's index of its models.
std::vector<PageModel> ReadIndex(std::string_view index);

// As a page. Where a browser has it from, a script in it finds out; without it `url` is shown. What is said of models is
// left out where `hides_models` is set.
std::string PageAsHtml(const std::vector<PageModel>& models, std::string_view url, bool hides_models);
std::string PageAsJson(const std::vector<PageModel>& models, bool hides_models);

// The headers of either, each with its end. The page loads nothing, and runs its own script alone.
std::string PageHeaders(bool is_html);

}  // namespace pytriton::guard
