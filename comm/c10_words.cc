#include "comm/c10_words.h"

#include <c10/util/Exception.h>

#include "comm/explain.h"

namespace tessera::comm {

std::string words_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return first_line(c10_error != nullptr ? c10_error->what_without_backtrace() : error.what());
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
