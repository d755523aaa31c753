// Walks through a JSON text from value to value without making a tree of it, so its memory does not grow with the text
// or its nesting. A text that is cut off or no JSON ends the walk.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pytriton {

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  // Calls `member(name, value)` for each member of an object, with the unescaped name and the value's text. Returns
  // false if the text is not a complete object.
  template <typename Member>
  bool Object(const Member& member) {
    return Each('{', '}', [&] {
      std::string name;
      if (!String(&name) || !Take(':')) return false;
      std::string_view value;
      if (!Value(&value)) return false;
      member(name, value);
      return true;
    });
  }

  // Calls `element(value)` for each element of an array. Returns false if the text is not a complete array.
  template <typename Element>
  bool Array(const Element& element) {
    return Each('[', ']', [&] {
      std::string_view value;
      if (!Value(&value)) return false;
      element(value);
      return true;
    });
  }

  // Returns the first character of the next value; '\0' at the end.
  char Next();
  // Reads a string, and turns its escapes into UTF-8.
  bool String(std::string* read);

 private:
  template <typename One>
  bool Each(char open, char close, const One& one) {
    if (!Take(open)) return false;
    if (Take(close)) return true;
    do {
      if (!one()) return false;
    } while (Take(','));
    return Take(close);
  }

  bool Take(char expected);
  // Skips a value and returns its text.
  bool Value(std::string_view* value);
  bool PassString();
  // Returns the number that four hexadecimal digits stand for; -1 if there are none.
  int Hexadecimal(size_t at) const;

  const std::string_view text_;
  size_t at_ = 0;
};

// Returns the text of a member's value, that of the last member if several have the name; "" if none has.
std::string_view JsonMember(std::string_view object, std::string_view name);

// Writes a text as a JSON string with quotes. Each byte that is not UTF-8 becomes '?'.
std::string JsonString(std::string_view text);

}  // namespace pytriton
