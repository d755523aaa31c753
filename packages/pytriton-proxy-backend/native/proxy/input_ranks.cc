#include "input_ranks.h"

#include <cctype>

namespace pytriton {

namespace {

// Walks through JSON that is well-formed. What is not ends the walk.
class Json {
 public:
  explicit Json(std::string_view text) : text_(text) {}

  // Calls `member(key)` for each member of an object, which has to go over its value.
  template <typename Member>
  void Object(const Member& member) {
    Each('{', '}', [&] {
      const std::string_view key = String();
      if (!Take(':')) at_ = text_.size();
      member(key);
    });
  }

  // Calls `element()` for each element of an array, likewise.
  template <typename Element>
  void Array(const Element& element) {
    Each('[', ']', element);
  }

  // As it is written: with its escapes.
  std::string_view String() {
    if (!Take('"')) return {};
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    if (at_ >= text_.size()) return {};
    return text_.substr(begin, at_++ - begin);
  }

  int64_t Number() {
    const std::string digits(Plain());
    return std::strtoll(digits.c_str(), nullptr, 10);
  }

  void Skip() {
    switch (Next()) {
      case '{': return Object([this](std::string_view) { Skip(); });
      case '[': return Array([this] { Skip(); });
      case '"': String(); return;
      default: Plain();
    }
  }

  bool AtArray() { return Next() == '['; }
  bool AtObject() { return Next() == '{'; }

 private:
  char Next() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool Take(char wanted) {
    if (Next() != wanted) return false;
    ++at_;
    return true;
  }

  // A number, or a word.
  std::string_view Plain() {
    Next();
    const size_t begin = at_;
    while (at_ < text_.size() && std::string_view(",]}").find(text_[at_]) == std::string_view::npos) ++at_;
    return text_.substr(begin, at_ - begin);
  }

  template <typename Item>
  void Each(char open, char close, const Item& item) {
    if (!Take(open)) {
      at_ = text_.size();
      return;
    }
    if (Take(close)) return;
    do {
      item();
    } while (Take(','));
    if (!Take(close)) at_ = text_.size();
  }

  std::string_view text_;
  size_t at_ = 0;
};

uint32_t CountElements(Json* json) {
  uint32_t count = 0;
  if (!json->AtArray()) {
    json->Skip();
    return 0;
  }
  json->Array([&] {
    json->Skip();
    ++count;
  });
  return count;
}

}  // namespace

void InputRanks::Read(std::string_view configuration) {
  ranks_.clear();
  int64_t max_batch_size = 0;
  Json json(configuration);
  const auto read_input = [&](std::string_view key, std::string* name, uint32_t* dims) {
    if (key == "name") {
      *name = json.String();
    } else if (key == "dims") {
      *dims = CountElements(&json);
    } else if (key == "reshape" && json.AtObject()) {
      // What the backend gets, in place of what callers send. It comes behind the dimensions.
      json.Object([&](std::string_view inner) {
        if (inner == "shape") {
          *dims = CountElements(&json);
        } else {
          json.Skip();
        }
      });
    } else {
      json.Skip();
    }
  };
  json.Object([&](std::string_view key) {
    if (key == "max_batch_size") {
      max_batch_size = json.Number();
    } else if (key == "input" && json.AtArray()) {
      json.Array([&] {
        std::string name;
        uint32_t dims = 0;
        json.Object([&](std::string_view inner) { read_input(inner, &name, &dims); });
        ranks_.emplace_back(std::move(name), dims);
      });
    } else {
      json.Skip();
    }
  });
  if (max_batch_size > 0) {
    for (auto& rank : ranks_) ++rank.second;
  }
}

}  // namespace pytriton
