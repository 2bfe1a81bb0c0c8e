// A progress bar with tqdm's look, for the rank that talks:
//
//   train:  42%|████▏     | 590/1404 [00:17<00:24, 4310 samples/s, loss=0.412, lr=1.2e-03]
//
// Where the output is no terminal (a file, a pipe, CI) there is no bar, only whole lines.
//
// [Note: two bars]
// During an evaluation a second bar stands on the line below, as tqdm's position=1. The cursor rests on the
// upper bar's line, and each redraw of the lower bar draws both. So a log line, which empties the cursor's
// line and what is below it before it is written, stands above both of them (core/log.cc), and neither bar
// needs to know of it. One bar alone needs no more than \r, which any terminal knows.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <utility>

namespace tessera::train {

class ProgressBar;

/// Where a run talks to its user. Copyable; borrows `out`, which must outlive every copy.
struct Display {
  std::ostream* out = nullptr;  ///< null: silent (ranks other than 0)
  bool is_terminal = false;     ///< draw bars; otherwise only lines
  bool ascii = false;           ///< bars of '#', for a locale without UTF-8
  bool has_sequences = false;   ///< the terminal's cursor can go up, so that there can be two bars
  std::function<int()> width = [] { return 80; };  ///< columns
  std::function<double()> now_s;  ///< a steady clock in seconds; unset: std::chrono::steady_clock
  ProgressBar* above = nullptr;   ///< see ProgressBar::below
};

/// Local. The display for `out`, which writes to file descriptor `fd`: asks the system whether
/// that is a terminal, how wide it is (again at every redraw; 80 where unknown), what it can do,
/// and whether the locale speaks UTF-8.
Display display_for(std::ostream& out, int fd);

/// Local. Writes a whole line where no bar stands (where one does: ProgressBar::print). On a terminal that is
/// narrower it is broken between words, and set in by `indent` from there on.
void print_line(const Display& display, const std::string& line, int indent = 2);

/// What a bar shows at one moment.
struct BarState {
  std::string description = {};
  int64_t done = 0;
  int64_t total = 0;
  double elapsed_s = 0;
  std::string unit = "it";    ///< of the rate
  double units_per_item = 1;  ///< the rate is done * units_per_item / elapsed_s
  std::string postfix = {};   ///< "loss=0.412, lr=1.2e-03"
};

/// Local. One line of at most `width` columns: the bar takes what the text leaves; where the text alone is
/// too long, the postfix loses its last parts, and what is still too long is cut.
std::string format_bar(const BarState& state, int width, bool ascii = false);
/// Local. tqdm's durations: "00:07", "12:34", "1:02:03"; "?" for what is not known.
std::string format_duration(double seconds);

/// One bar. Not thread-safe. Redraws at most ten times a second, and for the last item.
class ProgressBar {
 public:
  /// `keep`: the finished bar stays on the screen, as tqdm's `leave`.
  ProgressBar(const Display& display, BarState start, bool keep);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Local. `done` items are finished.
  void update(int64_t done);
  /// Local. Shown at the next redraw.
  void set_postfix(std::string postfix) { state_.postfix = std::move(postfix); }
  /// Local. These seconds (an evaluation in between) count neither as elapsed nor for the rate.
  void exclude_time(double seconds) { start_s_ += seconds; }
  /// Local. The display for a bar on the line below, while this one stays as it is; that bar must be gone
  /// before this one is used again. On a narrow terminal, or one whose cursor cannot go up, this bar is
  /// hidden and the other takes its place.
  Display below();
  /// Local. Removes the bar from the screen until the next update, so that others can write.
  void hide();
  /// Local. Writes a whole line, above the bar where there is one, as print_line().
  void print(const std::string& line, int indent = 2);
  /// Local. Draws the end state and moves to a new line (`keep`), or removes
  /// the bar. Called by the destructor too.
  void close();

 private:
  double now_s() const;
  bool drawing() const { return display_.out != nullptr && display_.is_terminal; }
  void draw();
  void draw_with(const std::string& below);

  Display display_;
  BarState state_;
  bool keep_;
  bool closed_ = false;
  double start_s_;
  double drawn_s_ = 0;
  std::string line_;       // as it was drawn last
  int drawn_columns_ = 0;  // of the line on the screen; 0: nothing is drawn
};

}  // namespace tessera::train
