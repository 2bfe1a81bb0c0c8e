// memory_chart() of memory_report.h. The colours are Okabe and Ito's, which colour-blind people can tell
// apart.
#include <algorithm>
#include <cmath>
#include <string_view>

#include "core/str.h"
#include "tools/common/columns.h"
#include "tools/memory/memory_report.h"

namespace tessera::tools {
namespace {

using train::MemoryTrial;

constexpr double kWidth = 960, kLeft = 64, kRight = 16, kBarsTop = 64, kBarsHeight = 280, kPanelsTop = 452,
                 kPanelHeight = 150;
constexpr const char* kColours[kNumMemoryUses] = {"#0072b2", "#56b4e9", "#cc79a7", "#e69f00", "#999999",
                                                  "#009e73", "#f0e442", "#d55e00", "#b8b8b8"};

/// The look of a kind of text or line: its colour on a light and on a dark page, and its other attributes.
struct Look {
  std::string_view name;
  bool is_line;
  const char* light;
  const char* dark;
  const char* attributes;
};
constexpr const char* kInk[] = {"#1f2328", "#f0f6fc"};
constexpr const char* kFaint[] = {"#59636e", "#9198a1"};
constexpr Look kLooks[] = {
    {"page", false, "#ffffff", "#0d1117", ""},
    {"title", false, kInk[0], kInk[1], "font-size=\"18\" font-weight=\"600\""},
    {"text", false, kInk[0], kInk[1], "font-size=\"13\""},
    {"middle", false, kInk[0], kInk[1], "font-size=\"13\" text-anchor=\"middle\""},
    {"axis", false, kFaint[0], kFaint[1], "font-size=\"12\" text-anchor=\"end\""},
    {"faint", false, kFaint[0], kFaint[1], "font-size=\"12\""},
    {"grid", true, "#d1d9e0", "#3d444d", "stroke-width=\"1\""},
    {"formula", true, kInk[0], kInk[1], "stroke-width=\"2.5\""},
    {"process", true, kInk[0], kInk[1], "stroke-width=\"1.5\" stroke-dasharray=\"4 3\""},
    {"phase", true, kFaint[0], kFaint[1], "stroke-width=\"1\" stroke-dasharray=\"2 3\""},
};

std::string look_of(std::string_view name) {
  const Look& look =
      *std::find_if(std::begin(kLooks), std::end(kLooks), [&](const Look& one) { return one.name == name; });
  return str("class=\"", name, "\" ", look.is_line ? "stroke" : "fill", "=\"", look.light, "\"",
             *look.attributes == 0 ? "" : " ", look.attributes);
}
std::string fill_of(size_t use) { return str("fill=\"", kColours[use], "\""); }

std::string number(double value) { return fixed(value, 1); }

/// The step of a scale of `steps` steps that reaches `value`: 1, 2, 2.5 or 5 times a power of ten.
double round_step(double value, int steps) {
  const double raw = value / steps, power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 2.5, 5.0, 10.0})
    if (factor * power >= raw) return factor * power;
  return 10 * power;
}

struct Scale {
  double step, top, unit;
  const char* unit_name;
  std::string label(double bytes) const {
    const double value = bytes / unit;
    return value == std::floor(value) ? std::to_string(static_cast<int64_t>(value)) : number(value);
  }
};

Scale scale_for(const std::vector<const MemoryTrial*>& stages) {
  double most = 1;
  for (const MemoryTrial* trial : stages)
    most =
        std::max({most, static_cast<double>(trial->peak.total()), static_cast<double>(trial->process_peak)});
  const double unit = most >= 1e10 ? 1e9 : most >= 1e7 ? 1e6 : 1e3;
  const double step = round_step(most, 5);
  return {step, std::ceil(most / step) * step, unit, unit == 1e9 ? "GB" : unit == 1e6 ? "MB" : "kB"};
}

class Chart {
 public:
  explicit Chart(const MemoryTrials& trials) : stages_(largest_by_stage(trials)), scale_(scale_for(stages_)) {
    for (const MemoryTrial* trial : stages_)
      largest_peak_ = std::max(largest_peak_, static_cast<double>(trial->peak.total()));
  }

  std::string svg() {
    head();
    bars();
    legend();
    for (size_t i = 0; i < stages_.size(); ++i) panel(i);
    out_ += "</svg>\n";
    return std::move(out_);
  }

 private:
  template <class... Args>
  void add(const Args&... args) {
    out_ += str(args..., "\n");
  }
  void words(double x, double y, const char* kind, const std::string& text) {
    add("<text x=\"", number(x), "\" y=\"", number(y), "\" ", look_of(kind), ">", text, "</text>");
  }

  void head() {
    const MemoryTrial& any = *stages_.front();
    add("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", kWidth, " ",
        kPanelsTop + kPanelHeight + 44, "\" font-family=\"sans-serif\">");
    // The colours of a light page are attributes, which every program draws. The style sheet changes them on
    // a dark page; programs without @media ignore it. (With var() instead they would draw everything in
    // black.)
    add("<style>@media(prefers-color-scheme:dark){");
    for (const Look& look : kLooks)
      add(".", look.name, "{", look.is_line ? "stroke" : "fill", ":", look.dark, "}");
    add("}</style>\n<rect ", look_of("page"), " width=\"100%\" height=\"100%\"/>");
    words(kLeft, 30, "title", str("Memory of a rank at the peak of a step, ", scale_.unit_name));
    words(kLeft, 50, "faint",
          str(any.world_size, any.world_size == 1 ? " rank" : " ranks", " (", any.backend, "), ",
              any.precision, ", ", any.optimizer));
  }

  double bar_y(double bytes) const { return kBarsTop + kBarsHeight * (1 - bytes / scale_.top); }

  void bars() {
    for (double bytes = 0; bytes <= scale_.top * 1.001; bytes += scale_.step) {
      add("<line ", look_of("grid"), " x1=\"", kLeft, "\" x2=\"", kWidth - kRight, "\" y1=\"",
          number(bar_y(bytes)), "\" y2=\"", number(bar_y(bytes)), "\"/>");
      words(kLeft - 8, bar_y(bytes) + 4, "axis", scale_.label(bytes));
    }
    const double slot = (kWidth - kLeft - kRight) / static_cast<double>(stages_.size()),
                 width = std::min(110.0, slot * 0.6);
    for (size_t i = 0; i < stages_.size(); ++i) {
      const MemoryTrial& trial = *stages_[i];
      const double x = kLeft + slot * (static_cast<double>(i) + 0.5) - width / 2;
      double below = 0;
      for (size_t use = 0; use < kNumMemoryUses; ++use) {
        const auto bytes = static_cast<double>(trial.peak.by_use[use]);
        if (bytes == 0) continue;
        add("<rect ", fill_of(use), " x=\"", number(x), "\" y=\"", number(bar_y(below + bytes)),
            "\" width=\"", number(width), "\" height=\"", number(bar_y(below) - bar_y(below + bytes)),
            "\"><title>", name_of(static_cast<MemoryUse>(use)), ": ", number(bytes / scale_.unit), " ",
            scale_.unit_name, "</title></rect>");
        below += bytes;
      }
      mark(x, width, static_cast<double>(trial.formula.total()), "formula");
      mark(x, width, static_cast<double>(trial.process_peak), "process");
      words(x + width / 2, bar_y(below) - 6, "middle", number(below / scale_.unit));
      words(x + width / 2, kBarsTop + kBarsHeight + 18, "middle", str("stage ", trial.stage));
    }
  }
  void mark(double x, double width, double bytes, const char* kind) {
    add("<line ", look_of(kind), " x1=\"", number(x - 10), "\" x2=\"", number(x + width + 10), "\" y1=\"",
        number(bar_y(bytes)), "\" y2=\"", number(bar_y(bytes)), "\"/>");
  }

  bool is_used(size_t use) const {
    // Uses too small to be seen are left out of the legend.
    return std::any_of(stages_.begin(), stages_.end(), [&](const MemoryTrial* trial) {
      return static_cast<double>(trial->peak.by_use[use]) > 0.002 * scale_.top;
    });
  }

  void legend() {
    double x = kLeft, y = kBarsTop + kBarsHeight + 44;
    const auto entry = [&](const std::string& name, const auto& draw_sign) {
      const double width = 40 + 7.2 * static_cast<double>(name.size());
      if (x + width > kWidth) x = kLeft, y += 20;
      draw_sign();
      words(x + 22, y, "text", name);
      x += width;
    };
    for (size_t use = 0; use < kNumMemoryUses; ++use) {
      if (!is_used(use)) continue;
      entry(std::string(name_of(static_cast<MemoryUse>(use))), [&] {
        add("<rect ", fill_of(use), " x=\"", number(x), "\" y=\"", number(y - 11),
            "\" width=\"14\" height=\"14\"/>");
      });
    }
    for (const auto& [name, kind] :
         {std::pair{"model state by formula", "formula"}, {"process, over idle", "process"}}) {
      entry(name, [&, kind = kind] {
        add("<line ", look_of(kind), " x1=\"", number(x), "\" x2=\"", number(x + 16), "\" y1=\"",
            number(y - 4), "\" y2=\"", number(y - 4), "\"/>");
      });
    }
  }

  /// One step of a stage: uses stacked over time, and where forward, backward and step begin.
  void panel(size_t index) {
    const MemoryTrial& trial = *stages_[index];
    if (trial.timeline.empty()) return;
    const double slot = (kWidth - kLeft - kRight) / static_cast<double>(stages_.size());
    const double left = kLeft + slot * static_cast<double>(index), width = slot - 18,
                 bottom = kPanelsTop + kPanelHeight;
    const double end = std::max(trial.timeline.back().seconds, 1e-9);
    const auto x_of = [&](double seconds) { return left + width * std::min(1.0, seconds / end); };
    const auto y_of = [&](double bytes) { return bottom - kPanelHeight * bytes / (1.12 * largest_peak_); };
    std::vector<double> below(trial.timeline.size(), 0);
    for (size_t use = 0; use < kNumMemoryUses; ++use) {
      std::string upper, lower;
      bool any = false;
      for (size_t i = 0; i < trial.timeline.size(); ++i) {
        const auto bytes = static_cast<double>(trial.timeline[i].bytes.by_use[use]);
        const double x = x_of(trial.timeline[i].seconds), next = i + 1 < trial.timeline.size()
                                                                     ? x_of(trial.timeline[i + 1].seconds)
                                                                     : left + width;
        upper += str(number(x), ",", number(y_of(below[i] + bytes)), " ", number(next), ",",
                     number(y_of(below[i] + bytes)), " ");
        lower =
            str(number(next), ",", number(y_of(below[i])), " ", number(x), ",", number(y_of(below[i])), " ") +
            lower;
        below[i] += bytes;
        any = any || bytes > 0;
      }
      if (any) add("<polygon ", fill_of(use), " points=\"", upper, lower, "\"/>");
    }
    add("<line ", look_of("grid"), " x1=\"", number(left), "\" x2=\"", number(left + width), "\" y1=\"",
        bottom, "\" y2=\"", bottom, "\"/>");
    for (const auto& [phase, seconds] : trial.phases) {
      add("<line ", look_of("phase"), " x1=\"", number(x_of(seconds)), "\" x2=\"", number(x_of(seconds)),
          "\" y1=\"", kPanelsTop, "\" y2=\"", bottom, "\"/>");
      const double room = width - (x_of(seconds) - left);
      if (room > 24) words(x_of(seconds) + 3, kPanelsTop + 10, "faint", phase);
    }
    words(left, bottom + 18, "text", str("stage ", trial.stage, ": a step, ", number(end * 1e3), " ms"));
    words(left, bottom + 34, "faint",
          str("peak ", number(static_cast<double>(trial.peak.total()) / scale_.unit), " ", scale_.unit_name,
              trial.disk.used
                  ? str(", on disk ", number(static_cast<double>(trial.disk.held.total()) / scale_.unit))
                  : ""));
  }

  std::vector<const MemoryTrial*> stages_;
  Scale scale_;
  double largest_peak_ = 1;
  std::string out_;
};

}  // namespace

std::string memory_chart(const MemoryTrials& trials) { return Chart(trials).svg(); }

}  // namespace tessera::tools
