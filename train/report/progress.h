// ProgressBar: a progress bar in tqdm's format, for rank 0:
//
//   train:  42%|████▏     | 590/1404 [00:17<00:24, 4310 samples/s, loss=0.412, lr=1.2e-03]
//
// If the output is not a terminal (a file, a pipe, CI) there is no bar, only whole lines.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <utility>

namespace tessera::train {

/// Where a run prints its progress. Copyable; borrows `out`, which must outlive every copy.
struct Display {
  std::ostream* out = nullptr;                     ///< null: silent (ranks other than 0)
  bool is_terminal = false;                        ///< draw bars; false: only lines
  bool ascii = false;                              ///< bars of '#', for a locale without UTF-8
  std::function<int()> width = [] { return 80; };  ///< columns
  std::function<double()> now_s;  ///< a steady clock in seconds; unset: std::chrono::steady_clock
};

/// The display for `out`, which writes to file descriptor `fd`. Determines whether that is a terminal,
/// its width (again at every redraw; 80 if unknown), and whether the locale is UTF-8.
Display display_for(std::ostream& out, int fd);

/// Writes a line when there is no bar (otherwise: ProgressBar::print). On a narrower terminal it is
/// wrapped between words, and continuation lines are indented by `indent` columns.
void print_line(const Display& display, const std::string& line, int indent = 2);

/// The contents of a bar.
struct BarState {
  std::string description = {};
  int64_t done = 0;
  int64_t total = 0;
  double elapsed_s = 0;
  std::string unit = "it";    ///< of the displayed rate
  double units_per_item = 1;  ///< the rate is done * units_per_item / elapsed_s
  std::string postfix = {};   ///< "loss=0.412, lr=1.2e-03"
};

/// One line of at most `width` columns. The bar takes the columns that the text leaves. If the text
/// alone is too long, the last parts of the postfix are left out, then the line is cut.
std::string format_bar(const BarState& state, int width, bool ascii = false);
/// Tqdm's durations: "00:07", "12:34", "1:02:03"; "?" if unknown (negative or not finite).
std::string format_duration(double seconds);

/// Draws one bar. Redraws at most ten times per second, and for the last item. Not thread-safe.
class ProgressBar {
 public:
  /// `keep`: the finished bar stays on the screen (tqdm's `leave`).
  ProgressBar(const Display& display, BarState start, bool keep);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Sets the number of finished items.
  void update(int64_t done);
  /// Shown at the next redraw.
  void set_postfix(std::string postfix) { state_.postfix = std::move(postfix); }
  /// Leaves these seconds (such as an evaluation) out of the elapsed time and the rate.
  void exclude_time(double seconds) { start_s_ += seconds; }
  /// Removes the bar from the screen until the next update, so that other output can be written, or another
  /// bar drawn in its place.
  void hide();
  /// Writes a line as print_line() does, above the bar if there is one.
  void print(const std::string& line, int indent = 2);
  /// Draws the final state and moves to a new line (`keep`), or removes the bar. The destructor calls
  /// it too.
  void close();

 private:
  double now_s() const;
  bool drawing() const { return display_.out != nullptr && display_.is_terminal; }
  void draw();

  Display display_;
  BarState state_;
  bool keep_;
  bool closed_ = false;
  double start_s_;
  double drawn_s_ = 0;
  int drawn_columns_ = 0;  // width of the line on the screen; 0: nothing is drawn
};

}  // namespace tessera::train
