// Sentences and plans as text, made without streams: a library that is linked with a libstdc++ of its own lives in one process with
// torch's, and what streams read, the locale of the process, is then set up in one of the two and looked for in the other.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace fxfuse {

inline void append(std::string& text, std::string_view part) { text += part; }
inline void append(std::string& text, char part) { text += part; }
template <std::integral T>
void append(std::string& text, T part) {
  text += std::to_string(part);
}

// Its parts one behind the other: strings, characters, integers; a bool is 0 or 1.
template <typename... Parts>
std::string text_from(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

}  // namespace fxfuse
