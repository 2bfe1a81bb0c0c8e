#include "launcher/process/error_file.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <vector>

#include "core/ascii.h"
#include "core/files/disk.h"
#include "core/files/input_file.h"
#include "core/files/pending_file.h"
#include "core/json/json_reader.h"
#include "core/parse_number.h"
#include "core/variables.h"

namespace tessera::launcher {
namespace {

constexpr size_t kMaxLineBytes = 500;
constexpr size_t kMaxReportBytes = 4000;
constexpr std::streamoff kTailBytes = 65'536;
constexpr size_t kTailLines = 60;

/// `text` on one line of bounded length, without control characters.
std::string one_line(std::string_view text, size_t max_bytes) {
  std::string line;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b' && i + 1 < text.size() && text[i + 1] == '[') {  // ESC [ parameters letter
      i += 2;
      while (i < text.size() && (text[i] < '@' || text[i] > '~')) ++i;
    } else if (text[i] == '\n' || text[i] == '\t') {
      line += ' ';
    } else if (static_cast<unsigned char>(text[i]) >= 0x20 && text[i] != 0x7f) {
      line += text[i];
    }
  }
  const size_t first = line.find_first_not_of(' '), last = line.find_last_not_of(' ');
  line = first == std::string::npos ? "" : line.substr(first, last - first + 1);
  if (line.size() <= max_bytes) return line;
  size_t cut = max_bytes;
  while (cut > 0 && (line[cut] & 0xC0) == 0x80) --cut;  // not inside a UTF-8 character
  return line.substr(0, cut) + "...";
}

/// Creates `path` with this content unless it exists already.
void write_once(const std::string& path, const std::string& content) {
  const Disk disk({.sync = false, .probe = {}});
  PendingFile pending(disk, path);
  pending.file().append(content);
  pending.file().close();
  // link() fails if the name exists, which keeps the first report. Some file systems have no hard links.
  if (::link(pending.temporary().c_str(), path.c_str()) != 0 && errno != EEXIST)
    ::rename(pending.temporary().c_str(), path.c_str());
}

/// The time of the last change of a file, as CLOCK_MONOTONIC: torch's reports have whole seconds.
int64_t time_of_file(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_time_type changed = fs::last_write_time(path, error);
  if (error) return monotonic_ns();
  const std::chrono::nanoseconds age = fs::file_time_type::clock::now() - changed;
  return monotonic_ns() - std::max<int64_t>(0, age.count());
}

bool mentions_error(std::string_view line) {
  static constexpr std::array<std::string_view, 9> kWords = {
      "error", "exception", "what()", "terminate called", "fatal", "failed", "cannot", "not found", "assert"};
  if (line.starts_with("frame #")) return false;  // a line of c10's stack trace
  const std::string lower = ascii_lower(line);
  return std::any_of(kWords.begin(), kWords.end(),
                     [&](std::string_view word) { return lower.find(word) != std::string::npos; });
}

}  // namespace

int64_t monotonic_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void report_error(const std::string& message, ErrorKind kind, int64_t time_ns) noexcept {
  try {
    std::string path;
    for (const char* name : {"TORCHELASTIC_ERROR_FILE", "TESSERA_ERROR_FILE"})
      path = text_variable(name).value_or(path);
    if (path.empty()) return;
    // torchrun names the least one, and for a rank without a report takes the time at which it has noticed
    // its end.
    constexpr int64_t kLaterS = 3;
    const int64_t now_ns = monotonic_ns(), ago_s = time_ns == 0 ? 0 : (now_ns - time_ns) / 1'000'000'000;
    nlohmann::json extra = {
        {"timestamp", std::to_string(::time(nullptr) - ago_s + (kind == ErrorKind::kOfPeer ? kLaterS : 0))},
        {"monotonic_ns", std::to_string(time_ns == 0 ? now_ns : time_ns)}};
    if (kind == ErrorKind::kWouldRecur) extra["would_recur"] = "true";
    if (kind == ErrorKind::kOfPeer) extra["of_peer"] = "true";
    const nlohmann::json report = {
        {"message", {{"message", one_line(message, kMaxReportBytes)}, {"extraInfo", extra}}}};
    // ASCII only: torchrun fails on bytes that its locale cannot decode.
    write_once(path, report.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace));
  } catch (...) {
    // The process may be out of memory, for example. The exit code still shows the launcher that this rank
    // has failed.
  }
}

std::optional<ErrorReport> read_error_report(const std::string& path) {
  std::string written;
  try {
    written = InputFile(path).read_all();
  } catch (const DiskError&) {
    return std::nullopt;
  }
  const nlohmann::json json = parse_json_or_discard(written);
  if (!json.is_object() || !json.contains("message")) return std::nullopt;
  ErrorReport report;
  report.time_ns = time_of_file(path);
  const nlohmann::json& inner = json["message"];
  const nlohmann::json& text = inner.is_object() && inner.contains("message") ? inner["message"] : inner;
  report.message = one_line(text.is_string() ? text.get<std::string>() : text.dump(), kMaxReportBytes);
  if (const auto extra = inner.is_object() ? inner.find("extraInfo") : inner.end();
      inner.is_object() && extra != inner.end() && extra->is_object()) {
    const auto text_of = [&](const char* name) {
      const auto value = extra->find(name);
      return value != extra->end() && value->is_string() ? value->get<std::string>() : std::string();
    };
    report.would_recur = text_of("would_recur") == "true";
    report.of_peer = text_of("of_peer") == "true";
    if (const auto time_ns = parse_number<int64_t>(text_of("monotonic_ns"))) report.time_ns = *time_ns;
  }
  return report;
}

std::string last_error_line(const std::string& log_path) {
  std::ifstream file(log_path, std::ios::binary);
  if (!file) return {};
  file.seekg(0, std::ios::end);
  const std::streamoff size = file.tellg();
  file.seekg(std::max<std::streamoff>(0, size - kTailBytes));
  std::string tail{std::istreambuf_iterator<char>(file), {}};
  std::replace(tail.begin(), tail.end(), '\r', '\n');  // a progress bar's redraws become lines

  std::vector<std::string> lines;
  std::istringstream stream(tail);
  for (std::string raw; std::getline(stream, raw);)
    if (std::string line = one_line(raw, kMaxLineBytes); !line.empty()) lines.push_back(std::move(line));
  const size_t begin = lines.size() > kTailLines ? lines.size() - kTailLines : 0;
  for (size_t i = lines.size(); i-- > begin;)
    if (mentions_error(lines[i])) return lines[i];
  return lines.empty() ? "" : lines.back();
}

bool has_other_lines(const std::string& log_path, const std::vector<std::string>& messages) {
  std::ifstream file(log_path, std::ios::binary);
  for (std::string raw; std::getline(file, raw);) {
    const std::string line = one_line(raw, kMaxReportBytes);
    // "[error] MESSAGE", or one line of a message with several.
    const auto is_in = [&](const std::string& message) {
      return line.find(message) != line.npos || message.find(line) != message.npos;
    };
    if (!line.empty() && std::none_of(messages.begin(), messages.end(), is_in)) return true;
  }
  return false;
}

}  // namespace tessera::launcher
