#include "tools/common/checkpoint_pass.h"

#include <unistd.h>

#include <iostream>
#include <memory>

#include "checkpoint/read/reader.h"
#include "core/log.h"
#include "train/report/progress.h"

namespace tessera::tools {

void pass_over_checkpoint(
    const std::string& description, const train::RunPath& path,
    const std::function<void(const std::string& tag, const OnProgress& progress)>& pass) {
  constexpr int64_t kMegabyte = 1'000'000;
  std::unique_ptr<train::ProgressBar> bar;
  const auto progress = [&](int64_t done, int64_t total) {
    const train::BarState start{
        .description = description, .total = (total + kMegabyte - 1) / kMegabyte, .unit = "MB"};
    if (!bar)
      bar = std::make_unique<train::ProgressBar>(train::display_for(std::cout, STDOUT_FILENO), start,
                                                 /*keep=*/false);
    bar->update(done == total ? start.total : done / kMegabyte);
  };
  const Logger log{LogOptions{}};
  checkpoint::read_latest_checkpoint(
      path.checkpoints, path.tag,
      [&](const std::string& line) {
        bar.reset();
        log.warning(line);
      },
      [&](const std::string& tag) { pass(tag, progress); });
}

}  // namespace tessera::tools
