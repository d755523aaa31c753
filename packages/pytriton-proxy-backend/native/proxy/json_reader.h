// Goes through a JSON text from value to value, without a tree of it: what it needs does not grow with the text, however
// deep that nests. A text that is cut off, or no JSON, ends the walk.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pytriton {

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  // Calls `member(name, value)` for each member of an object, with its name as it reads and the text of its value. False
  // where the text is no object or does not end as one.
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

  // Calls `element(value)` for each element of an array, likewise.
  template <typename Element>
  bool Array(const Element& element) {
    return Each('[', ']', [&] {
      std::string_view value;
      if (!Value(&value)) return false;
      element(value);
      return true;
    });
  }

  // The character that the next value begins with; '\0' at the end.
  char Next();
  // Reads a string: its escapes become UTF-8.
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
  // Passes over a value and returns its text.
  bool Value(std::string_view* value);
  bool PassString();
  // The number of four hexadecimal digits; -1 where there are none.
  int Hexadecimal(size_t at) const;

  const std::string_view text_;
  size_t at_ = 0;
};

// The text of the value of a member of an object, the last one of that name; empty where there is none.
std::string_view JsonMember(std::string_view object, std::string_view name);

// A text as a string of JSON, in quotes. Of what is no UTF-8, '?' is left.
std::string JsonString(std::string_view text);

}  // namespace pytriton
