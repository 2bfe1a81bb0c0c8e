#include "comm/c10_words.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

#include "comm/explain.h"

namespace tessera::comm {
namespace {

/// TorchScript puts what an operator has said behind a traceback, as "RuntimeError: …".
std::string_view without_traceback(std::string_view text) {
  if (text.find("TorchScript interpreter") == text.npos) return text;
  constexpr std::string_view kMarker = "Error: ";
  if (const size_t marker = text.rfind(kMarker); marker != text.npos)
    text.remove_prefix(marker + kMarker.size());
  text.remove_prefix(std::min(text.find_first_not_of(" \n\t"), text.size()));
  return text;
}

}  // namespace

std::string words_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  const std::string words = first_line(
      without_traceback(c10_error != nullptr ? c10_error->what_without_backtrace() : error.what()));
  return words.empty() ? "unknown error" : words;
}

std::string words_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return words_of(known);
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace tessera::comm
