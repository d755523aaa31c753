// What a browser, or curl, gets at `/` and `/docs`: the server's models, their inputs and outputs, and how to call
// them.
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

// Makes the HTML page. A script in it finds the address from which the browser has it; without scripts `url` is shown.
// With `hides_models`, nothing is said about models.
std::string PageAsHtml(const std::vector<PageModel>& models, std::string_view url, bool hides_models);
std::string PageAsJson(const std::vector<PageModel>& models, bool hides_models);

// The page as HTML and as plain text.
struct PageTexts {
  std::string html;
  std::string json;
};

// The texts for each port of the server. If they are old, one caller makes new ones, and the others get the old ones
// meanwhile.
class PageCache {
 public:
  using Clock = std::chrono::steady_clock;
  // The texts are used for `pause` after they were made.
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
    bool is_made = false;  // a caller is making them now
  };

  const Clock::duration pause_;
  std::mutex mutex_;
  std::map<uint16_t, Entry> entries_;
};

// The headers of either text, with their ends. The page loads nothing and runs only its own script.
std::string PageHeaders(bool is_html);

}  // namespace pytriton::guard
