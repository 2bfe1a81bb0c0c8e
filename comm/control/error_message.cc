#include "comm/control/error_message.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <system_error>

#include "core/files/disk_error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

/// TorchScript puts an operator's message behind a traceback, as "RuntimeError: …".
std::string_view without_traceback(std::string_view text) {
  if (text.find("TorchScript interpreter") == text.npos) return text;
  constexpr std::string_view kMarker = "Error: ";
  if (const size_t marker = text.rfind(kMarker); marker != text.npos)
    text.remove_prefix(marker + kMarker.size());
  text.remove_prefix(std::min(text.find_first_not_of(" \n\t"), text.size()));
  return text;
}

}  // namespace

std::string error_message(const std::exception& error) {
  const auto* system = dynamic_cast<const std::system_error*>(&error);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again)  // std::thread's
    return str("a thread cannot be started: ", describe_start_errno(system->code().value()));
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  const std::string message = first_line(
      without_traceback(c10_error != nullptr ? c10_error->what_without_backtrace() : error.what()));
  return message.empty() ? "unknown error" : message;
}

std::string error_message(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return error_message(known);
  } catch (...) {
    return "unknown error";
  }
}

std::string first_line(std::string_view text) {
  std::string line(text.substr(0, text.find('\n')));
  // "[enforce fail at x.cc:1] message", "failed with [/src/x.h:1] message"
  for (const char* extension : {".cc:", ".cpp:", ".h:", ".hpp:"}) {
    const size_t at = line.find(extension);
    const size_t begin = at == line.npos ? at : line.rfind('[', at);
    const size_t end = at == line.npos ? at : line.find("] ", at);
    if (begin != line.npos && end != line.npos) line.erase(begin, end + 2 - begin);
  }
  return line;
}

std::string name_ranks(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) out += i + 1 == ranks.size() ? " and " : ", ";
    out += std::to_string(ranks[i]);
  }
  return out;
}

std::string name_duration(std::chrono::milliseconds duration) {
  if (duration >= std::chrono::minutes(2) && duration % std::chrono::minutes(1) == duration.zero()) {
    return str(duration / std::chrono::minutes(1), " min");
  }
  return str(static_cast<double>(duration.count()) / 1000, " s");
}

}  // namespace tessera::comm
