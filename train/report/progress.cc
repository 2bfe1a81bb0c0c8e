#include "train/report/progress.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ostream>
#include <string_view>
#include <utility>

#include "core/str.h"
#include "core/terminal.h"
#include "core/utf8.h"
#include "core/variables.h"

namespace tessera::train {
namespace {

constexpr double kRedraw_s = 0.1;
constexpr std::array<std::string_view, 8> kEighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
constexpr std::string_view kFullBlock = "█";

// One column per character: none of the printed text has wide characters.
int columns(std::string_view text) { return static_cast<int>(num_characters(text)); }

std::string_view cut(std::string_view text, int width) {
  return first_characters(text, static_cast<size_t>(std::max(0, width)));
}

std::string bar_of(double fraction, int width, bool ascii) {
  const int eighths = static_cast<int>(fraction * width * 8);
  std::string bar;
  for (int i = 0; i < width; ++i) {
    const int filled = std::clamp(eighths - 8 * i, 0, 8);
    if (ascii) {
      bar += filled == 8 ? '#' : ' ';
    } else if (filled == 8) {
      bar += kFullBlock;
    } else {
      bar += filled == 0 ? std::string_view(" ") : kEighths[static_cast<size_t>(filled)];
    }
  }
  return bar;
}

std::string format_rate(double rate, const std::string& unit) {
  return printed(rate < 10 ? "%.2f " : rate < 100 ? "%.1f " : "%.0f ", rate) + unit + "/s";
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {  // the first one set decides, as in setlocale(3)
    const auto locale = text_variable(name);
    if (locale) return locale->find("UTF-8") != locale->npos || locale->find("utf8") != locale->npos;
  }
  return false;
}

}  // namespace

Display display_for(std::ostream& out, int fd) {
  Display display;
  display.out = &out;
  display.is_terminal = isatty(fd) == 1;
  display.ascii = !locale_is_utf8();
  display.width = [fd] { return terminal_width(fd); };
  return display;
}

void print_line(const Display& display, const std::string& line, int indent) {
  if (display.out == nullptr) return;
  *display.out << (display.is_terminal ? wrap_words(line, display.width() - 1, indent) : line) << '\n'
               << std::flush;
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const auto total = static_cast<long long>(seconds);
  return total >= 3600 ? printed("%lld:%02lld:%02lld", total / 3600, total / 60 % 60, total % 60)
                       : printed("%02lld:%02lld", total / 60, total % 60);
}

std::string format_bar(const BarState& state, int width, bool ascii) {
  const double fraction =
      state.total > 0
          ? std::clamp(static_cast<double>(state.done) / static_cast<double>(state.total), 0.0, 1.0)
          : 0.0;
  const double items_per_s = state.elapsed_s > 0 ? static_cast<double>(state.done) / state.elapsed_s : 0.0;
  std::string left = (state.description.empty() ? "" : state.description + ": ") +
                     printed("%3d%%|", static_cast<int>(fraction * 100));
  std::string right = str("| ", state.done, "/", state.total, " [", format_duration(state.elapsed_s), "<");
  right += items_per_s > 0 ? format_duration(static_cast<double>(state.total - state.done) / items_per_s) +
                                 ", " + format_rate(items_per_s * state.units_per_item, state.unit)
                           : "?, ? " + state.unit + "/s";
  std::string postfix = state.postfix;
  const auto text_columns = [&] {
    return columns(left) + columns(right) + (postfix.empty() ? 0 : 2 + columns(postfix)) + 1;
  };
  while (!postfix.empty() && text_columns() > width) {  // its last parts are left out
    const size_t comma = postfix.rfind(", ");
    postfix.resize(comma == postfix.npos ? 0 : comma);
  }
  right += (postfix.empty() ? "" : ", " + postfix) + "]";

  const int bar_width = std::max(0, width - columns(left) - columns(right));
  return std::string(cut(left + bar_of(fraction, bar_width, ascii) + right, width));
}

ProgressBar::ProgressBar(const Display& display, BarState start, bool keep)
    : display_(display), state_(std::move(start)), keep_(keep), start_s_(now_s()) {
  if (drawing()) draw();
}

ProgressBar::~ProgressBar() { close(); }

double ProgressBar::now_s() const {
  if (display_.now_s) return display_.now_s();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void ProgressBar::draw() {
  drawn_s_ = now_s();
  state_.elapsed_s = drawn_s_ - start_s_;
  // One column stays free: some terminals wrap as soon as the last one is written.
  const int width = display_.width() - 1;
  const std::string line = format_bar(state_, width, display_.ascii);
  const int line_columns = columns(line);
  const int left_over = std::min(drawn_columns_, width) -
                        line_columns;  // of the previous line; the terminal may have been wider
  *display_.out << '\r' << line << std::string(static_cast<size_t>(std::max(0, left_over)), ' ')
                << std::flush;
  drawn_columns_ = line_columns;
}

void ProgressBar::update(int64_t done) {
  state_.done = done;
  if (!drawing() || closed_) return;
  if (drawn_columns_ == 0 || done >= state_.total || now_s() - drawn_s_ >= kRedraw_s) draw();
}

void ProgressBar::hide() {
  if (drawn_columns_ == 0) return;
  const int blank = std::max(0, std::min(drawn_columns_, display_.width() - 1));
  *display_.out << '\r' << std::string(static_cast<size_t>(blank), ' ') << '\r' << std::flush;
  drawn_columns_ = 0;
}

void ProgressBar::print(const std::string& line, int indent) {
  hide();
  print_line(display_, line, indent);
}

void ProgressBar::close() {
  if (closed_) return;
  closed_ = true;
  if (!drawing()) return;
  if (!keep_) return hide();
  draw();
  *display_.out << '\n' << std::flush;
  drawn_columns_ = 0;
}

}  // namespace tessera::train
