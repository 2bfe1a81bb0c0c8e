#include "core/environment/ended_ranks.h"

#include <filesystem>
#include <fstream>

#include "core/variables.h"

namespace tessera {
namespace {

std::filesystem::path list_beside(const std::string& error_file) {
  return std::filesystem::path(error_file).parent_path() / "ended_ranks";
}

}  // namespace

void add_ended_rank(const std::string& error_file, int rank) noexcept {
  try {
    std::ofstream(list_beside(error_file), std::ios::app) << rank << '\n' << std::flush;
  } catch (...) {  // then the others wait as long as without a launcher
  }
}

std::vector<int> ended_ranks() {
  std::vector<int> ranks;
  const auto error_file = text_variable("TESSERA_ERROR_FILE");
  if (!error_file) return ranks;
  std::ifstream list(list_beside(*error_file));
  for (int rank = 0; list >> rank && list.peek() == '\n';) ranks.push_back(rank);
  return ranks;
}

}  // namespace tessera
