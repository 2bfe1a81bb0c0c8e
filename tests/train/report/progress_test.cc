#include "train/report/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::train {
namespace {

int columns(const std::string& text) {
  int count = 0;
  for (char byte : text) count += (static_cast<unsigned char>(byte) & 0xc0) != 0x80;
  return count;
}

// What a terminal shows after these bytes: one string per row. Supports \r and \n.
std::vector<std::string> screen(const std::string& bytes) {
  std::vector<std::vector<std::string>> rows(1);
  size_t row = 0, column = 0;
  for (size_t i = 0; i < bytes.size();) {
    size_t length = 1;
    while (i + length < bytes.size() && (static_cast<unsigned char>(bytes[i + length]) & 0xc0) == 0x80)
      ++length;
    const std::string character = bytes.substr(i, length);
    i += length;
    if (character == "\r") {
      column = 0;
    } else if (character == "\n") {
      if (++row == rows.size()) rows.emplace_back();
      column = 0;
    } else {
      if (rows[row].size() <= column) rows[row].resize(column + 1, " ");
      rows[row][column++] = character;
    }
  }
  std::vector<std::string> text;
  for (const auto& row : rows) {
    std::string line;
    for (const auto& character : row) line += character;
    line.erase(line.find_last_not_of(' ') + 1);
    text.push_back(line);
  }
  return text;
}

struct FakeTerminal {
  std::ostringstream out;
  double now_s = 100;
  int width = 80;
  Display display(bool is_terminal = true) {
    return {.out = &out,
            .is_terminal = is_terminal,
            .width = [this] { return width; },
            .now_s = [this] { return now_s; }};
  }
};

TEST(FormatBar, LooksAsTqdms) {
  const BarState state{.description = "train",
                       .done = 590,
                       .total = 1404,
                       .elapsed_s = 17.5,
                       .unit = "samples",
                       .units_per_item = 128,
                       .postfix = "loss=0.412, lr=1.2e-03"};
  EXPECT_EQ(format_bar(state, 90),
            "train:  42%|█████▉        | 590/1404 [00:17<00:24, 4315 samples/s, loss=0.412, lr=1.2e-03]");
  EXPECT_EQ(format_bar(state, 90, /*ascii=*/true),
            "train:  42%|#####         | 590/1404 [00:17<00:24, 4315 samples/s, loss=0.412, lr=1.2e-03]");
}

TEST(FormatBar, Ends) {
  EXPECT_EQ(format_bar({.done = 0, .total = 8}, 40), "  0%|            | 0/8 [00:00<?, ? it/s]");
  EXPECT_EQ(format_bar({.done = 8, .total = 8, .elapsed_s = 4}, 43),
            "100%|████████| 8/8 [00:04<00:00, 2.00 it/s]");
  EXPECT_EQ(format_bar({.done = 0, .total = 0}, 36), "  0%|        | 0/0 [00:00<?, ? it/s]");
}

TEST(FormatBar, IsNeverWiderThanTheTerminal) {
  for (int width = 0; width <= 200; ++width) {
    for (int64_t done : {0, 1, 333, 999, 1000}) {
      for (bool ascii : {false, true}) {
        const BarState state{
            .description = "évaluer", .done = done, .total = 1000, .elapsed_s = 4000, .postfix = "loss=nan"};
        const std::string bar = format_bar(state, width, ascii);
        EXPECT_LE(columns(bar), width);
        if (width >= 70) {
          EXPECT_EQ(columns(bar), width) << "the bar fills the line";
        }
      }
    }
  }
}

TEST(FormatDuration, AsTqdm) {
  EXPECT_EQ(format_duration(0), "00:00");
  EXPECT_EQ(format_duration(7.9), "00:07");
  EXPECT_EQ(format_duration(754), "12:34");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(1e300 * 1e300), "?");
  EXPECT_EQ(format_duration(-1), "?");
}

TEST(ProgressBar, RedrawsAtMostTenTimesASecondAndAtTheEnd) {
  FakeTerminal terminal;
  ProgressBar bar(terminal.display(), {.total = 1000}, /*keep=*/true);
  for (int i = 1; i <= 999; ++i) {
    terminal.now_s += 0.001;
    bar.update(i);
  }
  const std::string before = terminal.out.str();
  const auto redraws = std::count(before.begin(), before.end(), '\r');
  EXPECT_GE(redraws, 9);
  EXPECT_LE(redraws, 11);
  bar.update(1000);
  EXPECT_EQ(screen(terminal.out.str()).back().substr(0, 5), "100%|");
}

TEST(ProgressBar, KeptBarEndsItsLineAndExcludedTimeDoesNotCount) {
  FakeTerminal terminal;
  terminal.width = 44;
  {
    ProgressBar bar(terminal.display(), {.total = 8}, /*keep=*/true);
    terminal.now_s += 64;
    bar.exclude_time(60);
    bar.update(8);
  }
  EXPECT_EQ(screen(terminal.out.str()),
            (std::vector<std::string>{"100%|████████| 8/8 [00:04<00:00, 2.00 it/s]", ""}));
}

TEST(ProgressBar, LinesStandAboveTheBar) {
  FakeTerminal terminal;
  ProgressBar bar(terminal.display(), {.description = "train", .total = 4}, /*keep=*/true);
  bar.update(1);
  bar.print("a line");
  bar.update(2);
  const auto rows = screen(terminal.out.str());
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0], "a line");
  EXPECT_EQ(rows[1].substr(0, 11), "train:  50%");
}

TEST(ProgressBar, ShorterLineLeavesNoRemains) {
  FakeTerminal terminal;
  terminal.width = 60;
  ProgressBar bar(terminal.display(),
                  {.total = 4, .postfix = "a long postfix, cut at the edge of the terminal"}, true);
  terminal.width = 30;
  terminal.now_s += 1;
  bar.set_postfix("");
  bar.update(2);
  bar.hide();
  EXPECT_LE(columns(screen(terminal.out.str()).back()), 59);
  terminal.width = 60;
  ProgressBar other(terminal.display(), {.total = 4, .postfix = "x"}, true);
  other.set_postfix("");
  other.hide();
  EXPECT_EQ(terminal.out.str().find('\033'), std::string::npos) << "no escape sequences";
}

TEST(ProgressBar, AnotherOneTakesItsPlaceWhileItIsHidden) {
  FakeTerminal terminal;
  ProgressBar bar(terminal.display(), {.description = "train", .total = 4}, /*keep=*/true);
  bar.update(2);
  bar.hide();
  {
    ProgressBar other(terminal.display(), {.description = "evaluate", .total = 9}, /*keep=*/false);
    ASSERT_EQ(screen(terminal.out.str()).size(), 1u);
    EXPECT_EQ(screen(terminal.out.str())[0].substr(0, 14), "evaluate:   0%");
  }
  bar.print("epoch 1.00");
  bar.update(3);
  const std::vector<std::string> rows = screen(terminal.out.str());
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0], "epoch 1.00");
  EXPECT_EQ(rows[1].substr(0, 11), "train:  75%");
}

TEST(ProgressBar, PlainOutputHasLinesOnlyAndNoOutputNone) {
  FakeTerminal terminal;
  for (const Display& display : {terminal.display(/*is_terminal=*/false), Display{}}) {
    ProgressBar bar(display, {.total = 4}, /*keep=*/true);
    bar.update(2);
    bar.print("step 2/4");
    bar.update(4);
    bar.close();
    print_line(display, "a line");
  }
  EXPECT_EQ(terminal.out.str(), "step 2/4\na line\n");
}

TEST(DisplayFor, AFileIsNoTerminal) {
  std::ostringstream out;
  std::FILE* file = std::tmpfile();
  const Display display = display_for(out, fileno(file));
  EXPECT_FALSE(display.is_terminal);
  EXPECT_EQ(display.width(), 80);
  std::fclose(file);
}

}  // namespace
}  // namespace tessera::train
