#include "tools/common/checkpoint_pass.h"

#include <unistd.h>

#include <iostream>
#include <memory>
#include <utility>

#include "checkpoint/read/reader.h"
#include "core/str.h"
#include "core/utf8.h"
#include "train/report/progress.h"

namespace tessera::tools {

checkpoint::ConvertResult convert_with_bar(const std::string& description, const train::RunPath& path,
                                           checkpoint::ConvertOptions options) {
  constexpr int64_t kMegabyte = 1'000'000;
  std::unique_ptr<train::ProgressBar> bar;
  options.directory = path.checkpoints;
  options.progress = [&](int64_t done, int64_t total) {
    const train::BarState start{
        .description = description, .total = (total + kMegabyte - 1) / kMegabyte, .unit = "MB"};
    if (!bar)
      bar = std::make_unique<train::ProgressBar>(train::display_for(std::cout, STDOUT_FILENO), start,
                                                 /*keep=*/false);
    bar->update(done == total ? start.total : done / kMegabyte);
  };
  const Logger log{LogOptions{}};
  checkpoint::ConvertResult result;
  checkpoint::read_latest_checkpoint(
      path.checkpoints, path.tag,
      [&](const std::string& line) {
        bar.reset();
        log.warning(line);
      },
      [&](const std::string& tag) {
        options.tag = tag;
        result = checkpoint::convert_checkpoint(options);
      });
  return result;
}

void print_notes(const checkpoint::ConvertResult& result) {
  for (const std::string& note : result.notes)
    std::cout << "note: " << without_control_characters(note, /*one_line=*/true) << std::endl;
}

void warn_of_overflow(const checkpoint::ConvertResult& result, const std::string& output,
                      std::optional<DType> dtype, const std::string& advice, const Logger& log) {
  if (result.num_overflowed == 0 || !dtype || *dtype == DType::kFloat32) return;  // in fp32 from fp64 values
  log.warning(str(output, ": ", format_count(result.num_overflowed),
                  result.num_overflowed == 1 ? " element is" : " elements are", " too large for ",
                  name_of(*dtype), " and infinite now, first in ", quoted_name(result.first_overflowed),
                  advice));
}

}  // namespace tessera::tools
