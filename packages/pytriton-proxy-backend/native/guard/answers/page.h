// What a browser, or curl, gets at `/` and `/docs`: the models of the server, what they take and give, and how to ask them.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
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

// Both texts.
struct PageTexts {
  std::string html;
  std::string json;
};

// The texts for each port of the server. One caller makes them anew where they are old; others get the old ones meanwhile.
class PageCache {
 public:
  using Clock = std::chrono::steady_clock;
  // How long after they are made the texts are given.
  explicit PageCache(Clock::duration pause) : pause_(pause) {}

  // `make()` makes the texts.
  template <typename Make>
  std::shared_ptr<const PageTexts> Get(uint16_t port, const Make& make) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Entry& entry = entries_[port];
      if (entry.texts != nullptr && (entry.is_made || Clock::now() - entry.made_at < pause_)) return entry.texts;
      entry.is_made = true;
    }
    std::shared_ptr<const PageTexts> texts = std::make_shared<PageTexts>(make());
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_[port] = {texts, Clock::now(), false};
    return texts;
  }

 private:
  struct Entry {
    std::shared_ptr<const PageTexts> texts;
    Clock::time_point made_at;
    bool is_made = false;  // by a caller, now
  };

  const Clock::duration pause_;
  std::mutex mutex_;
  std::map<uint16_t, Entry> entries_;
};

// The headers of either, each with its end. The page loads nothing, and runs its own script alone.
std::string PageHeaders(bool is_html);

}  // namespace pytriton::guard
