// Reads and writes of a SpillFile in MB/s: direct and buffered, by size of the pieces.
// A round of each case and one of the simplest way, one thread that calls pread or pwrite with O_DIRECT and 4
// MiB, alternate: `x_plain` is the median ratio, because the speed of a shared disk changes from second to
// second.
//
// TESSERA_BENCH_DIRECTORY: a folder on the disk to measure (default: the system's temporary folder).
#include <benchmark/benchmark.h>
#include <fcntl.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/median.h"
#include "core/async_io/spill_file.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"

namespace tessera::benchmarks {
namespace {

constexpr int64_t kBytes = 512 << 20;
constexpr int64_t kUnit = 32 << 20;  // of one transfer: a unit's state
constexpr int kRounds = 5;

enum class Kind { kRead, kWrite, kMixed };
constexpr const char* kNames[] = {"read", "write", "mixed"};

std::string directory() {
  const char* const named = std::getenv("TESSERA_BENCH_DIRECTORY");
  return named ? named : std::filesystem::temp_directory_path().string();
}

/// Memory of kBytes, at a multiple of a page, that differs from page to page.
std::span<std::byte> memory() {
  static const std::unique_ptr<std::byte, decltype(&std::free)> data = [] {
    auto* const bytes = static_cast<std::byte*>(std::aligned_alloc(SpillFile::kAlignment, kBytes));
    if (!bytes) throw std::bad_alloc();
    for (int64_t i = 0; i < kBytes; i += sizeof i) std::memcpy(bytes + i, &i, sizeof i);
    return std::unique_ptr<std::byte, decltype(&std::free)>(bytes, &std::free);
  }();
  return {data.get(), static_cast<size_t>(kBytes)};
}

/// Mixed: each second unit is written and the others are read, as in an update of optimizer state.
bool writes(Kind kind, int64_t unit) {
  return kind == Kind::kWrite || (kind == Kind::kMixed && unit % 2 == 1);
}

/// One thread, one call at a time.
class Plain {
 public:
  Plain() : file_(::open(directory().c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600)) {
    if (!file_) throw std::runtime_error("no O_TMPFILE with O_DIRECT in " + directory());
    if (::posix_fallocate(file_.get(), 0, kBytes) != 0) throw std::runtime_error("no room in " + directory());
    run(Kind::kWrite);
  }

  void run(Kind kind) const {
    constexpr int64_t kPiece = 4 << 20;
    for (int64_t at = 0; at < kBytes; at += kPiece) {
      std::byte* const data = memory().data() + at;
      const ssize_t got = writes(kind, at / kUnit) ? ::pwrite(file_.get(), data, kPiece, at)
                                                   : ::pread(file_.get(), data, kPiece, at);
      if (got != kPiece) throw std::runtime_error(str("the plain way: ", got, " of ", kPiece, " bytes"));
    }
  }

 private:
  FileDescriptor file_;
};

void run(SpillFile& file, Kind kind) {
  std::vector<SpillFile::Transfer> transfers;
  for (int64_t at = 0; at < kBytes; at += kUnit) {
    const auto part = memory().subspan(static_cast<size_t>(at), static_cast<size_t>(kUnit));
    transfers.push_back(writes(kind, at / kUnit) ? file.write(at, part) : file.read(at, part));
  }
  for (const SpillFile::Transfer transfer : transfers) file.wait(transfer);
}

double seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void measure(benchmark::State& state, Kind kind, const SpillFileOptions& options) {
  static const Plain plain;
  SpillFile file(options);
  run(file, Kind::kWrite);  // the first write of a block costs more
  std::vector<double> rates, ratios, cpu;
  for (auto _ : state) {
    const std::clock_t before = std::clock();
    const double mine = seconds([&] { run(file, kind); });
    cpu.push_back(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC);
    const double theirs = seconds([&] { plain.run(kind); });
    state.SetIterationTime(mine);
    rates.push_back(kBytes / mine / 1e6);
    ratios.push_back(theirs / mine);
  }
  state.counters["MB_per_s"] = median(rates);
  state.counters["x_plain"] = median(ratios);
  state.counters["cpu_s_per_GB"] = median(cpu) / (kBytes / 1e9);
  if (file.direct() != options.direct) state.SetLabel(file.direct() ? "direct" : "buffered");
}

void add(Kind kind, const SpillFileOptions& options, const std::string& more) {
  const std::string name =
      str(kNames[static_cast<int>(kind)], options.direct ? "/direct" : "/buffered", more);
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { measure(state, kind, options); })
      ->UseManualTime()
      ->Iterations(kRounds)
      ->Unit(benchmark::kMillisecond);
}

void add_all() {
  for (const Kind kind : {Kind::kRead, Kind::kWrite, Kind::kMixed})
    for (const bool direct : {true, false}) {
      SpillFileOptions options{.directory = directory(), .bytes = kBytes, .purpose = "the benchmark"};
      options.direct = direct;
      for (const int64_t kib : {256, 1024, 4096, 16384}) {
        options.piece_bytes = kib << 10;
        add(kind, options, str("/piece_KiB:", kib));
      }
      if (!direct) continue;
      options.piece_bytes = SpillFileOptions().piece_bytes;
      for (const int threads : {1, 2, 4, 8, 16, 32}) {
        options.num_threads = threads;
        add(kind, options, str("/threads:", threads));
      }
    }
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  tessera::benchmarks::add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
