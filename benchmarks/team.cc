#include "benchmarks/team.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "core/error.h"
#include "core/str.h"
#include "launcher/environment/environment.h"

namespace tessera::benchmarks {
namespace {

struct Pipe {
  FileDescriptor read, write;
};

/// Closed in started programs, unless they become their stdin or stdout.
Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw Error("cannot make a pipe: ", std::strerror(errno));
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

bool trains_alone(Mode mode) { return mode == Mode::kPlain || mode == Mode::kEngineAlone; }

StepTimes slower_of(const StepTimes& a, const StepTimes& b) {
  return {std::max(a.step_s, b.step_s), std::max(a.forward_s, b.forward_s),
          std::max(a.backward_s, b.backward_s), std::max(a.update_s, b.update_s), std::max(a.cpu_s, b.cpu_s)};
}

}  // namespace

Team::Team(Mode mode, int size, const std::vector<std::string>& rank_args) : name_(name_of(mode)) {
  for (int rank = 0; rank < size; ++rank) {
    launcher::RankVariables variables;
    variables.rank = trains_alone(mode) ? 0 : rank;
    variables.world_size = trains_alone(mode) ? 1 : size;
    variables.local_rank = variables.rank;
    variables.local_world_size = variables.world_size;
    variables.master_addr = "127.0.0.1";
    variables.master_port = port_.port();
    Pipe to = make_pipe(), from = make_pipe();
    launcher::SpawnOptions spawn;
    spawn.program = "/proc/self/exe";
    spawn.args = rank_args;
    spawn.args.push_back(str("--rank-of=", name_));
    spawn.environment = launcher::rank_environment(variables);
    spawn.stdin_fd = to.read.get();
    spawn.stdout_fd = from.write.get();
    ranks_.push_back({launcher::Process::spawn(spawn), std::move(to.write), std::move(from.read), {}});
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (const std::string word = answer_of(rank); word != "ready")
      throw Error("rank ", rank, " of ", name_, " says \"", word, "\" in place of \"ready\"");
  }
}

void Team::ask(const std::string& line) {
  const std::string text = line + "\n";
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (::write(ranks_[rank].to.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
      throw Error("rank ", rank, " of ", name_, " is gone: its last words are above");
  }
}

std::string Team::answer_of(size_t rank) {
  std::string& text = ranks_[rank].read;
  size_t end;
  while ((end = text.find('\n')) == std::string::npos) {
    char buffer[4096];
    const ssize_t num_read = ::read(ranks_[rank].from.get(), buffer, sizeof buffer);
    if (num_read < 0 && errno == EINTR) continue;
    if (num_read <= 0) throw Error("rank ", rank, " of ", name_, " has ended: its last words are above");
    text.append(buffer, static_cast<size_t>(num_read));
  }
  const std::string line = text.substr(0, end);
  text.erase(0, end + 1);
  return line;
}

std::vector<StepTimes> Team::turn(int num_steps) {
  ask(str("train ", num_steps + 1));
  std::vector<StepTimes> slowest(static_cast<size_t>(num_steps) + 1);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    std::istringstream numbers(answer_of(rank));
    for (StepTimes& times : slowest) {
      StepTimes mine;
      if (!(numbers >> mine.step_s >> mine.forward_s >> mine.backward_s >> mine.update_s >> mine.cpu_s))
        throw Error("rank ", rank, " of ", name_, " answered \"", numbers.str(), '"');
      times = slower_of(times, mine);
    }
  }
  slowest.erase(slowest.begin());
  return slowest;
}

Footprint Team::footprint() {
  ask("footprint");
  Footprint largest;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Footprint mine;
    std::istringstream numbers(answer_of(rank));
    if (!(numbers >> mine.peak_mb >> mine.state_mb >> mine.num_parameters))
      throw Error("rank ", rank, " of ", name_, " answered \"", numbers.str(), '"');
    largest = {std::max(largest.peak_mb, mine.peak_mb), std::max(largest.state_mb, mine.state_mb),
               mine.num_parameters};
  }
  return largest;
}

}  // namespace tessera::benchmarks
