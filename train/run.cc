#include "train/run.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/str.h"
#include "core/variables.h"
#include "train/report/report.h"
#include "train/restart.h"
#include "train/run/run_directory.h"

namespace tessera::train {
namespace {

void log_report(const RunConfig& run, const Logger& logger) {
  for (const std::string& line : run.report.warnings) logger.warning(line);
  for (const std::string& line : run.report.resolved) logger.info(line);
}

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1e3));
}

comm::JoinOptions join_options(const TrainerConfig& trainer, const Logger& logger) {
  return {.backend = trainer.backend,
          .device = trainer.device,
          .timeout = to_milliseconds(trainer.timeout_s),
          .rendezvous_timeout = to_milliseconds(trainer.rendezvous_timeout_s),
          .verify = trainer.verify,
          .log = logger};
}

/// The folder of the run that goes on, whose task keeps the files() that it has begun with; "" for a new one.
std::filesystem::path resumed_run(const TrainerConfig& trainer, bool goes_on) {
  const std::filesystem::path& folder = trainer.output_dir;
  return goes_on && (is_there(checkpoints_of(folder)) || is_there(folder / kRunIdName)) ? folder : "";
}

}  // namespace

at::Device choose_device(const TrainerConfig& trainer, const comm::Environment& environment) {
  try {
    return comm::choose_device(join_options(trainer, {}), environment);
  } catch (const CommError& error) {
    throw ConfigError("comm.backend: ", error.what());
  } catch (const Error& error) {
    throw ConfigError("trainer.device: found \"", trainer.device, "\", but ", error.what(),
                      "; expected \"cpu\" or \"auto\" here");
  }
}

int choose_num_threads(const TrainerConfig& trainer, const comm::Environment& environment) {
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  // Threads that take turns on few cores wait for each other in every operator: steps would take minutes.
  const int64_t most = std::max<int64_t>(16, 4 * cores);
  if (trainer.num_threads > most)
    throw ConfigError("trainer.num_threads: found ", trainer.num_threads, " on a host with ",
                      counted(cores, "core"), "; expected at most ", most,
                      ", or 0 for its cores divided by the ranks on it");
  if (trainer.num_threads > 0) return static_cast<int>(trainer.num_threads);
  return static_cast<int>(std::max<int64_t>(1, cores / std::max(1, environment.local_world_size)));
}

comm::CommunicatorPtr join_group(const TrainerConfig& trainer, const comm::Environment& environment,
                                 const Logger& logger) {
  return comm::join(join_options(trainer, logger), environment);
}

void make_deterministic() {
  set_default_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8");  // read by cuBLAS at its first use
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
}

void allow_tf32() {
  at::Context& context = at::globalContext();
  context.setAllowTF32CuBLAS(true);
  context.setAllowTF32CuDNN(true);
}

void prefer_attention(const std::vector<std::string>& backends) {
  // Without this, on some devices, libtorch's first attention replaces the order by its own: cuDNN's first.
  ::setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1", /*overwrite=*/1);
  at::Context& context = at::globalContext();
  const auto is_on = [&](std::string_view name) {
    return std::find(backends.begin(), backends.end(), name) != backends.end();
  };
  context.setSDPUseFlash(is_on("flash"));
  context.setSDPUseMemEfficient(is_on("efficient"));
  context.setSDPUseCuDNN(is_on("cudnn"));
  context.setSDPUseMath(is_on("math"));

  std::vector<int64_t> order;
  const auto add = [&](at::SDPBackend backend) {
    const auto number = static_cast<int64_t>(backend);
    if (std::find(order.begin(), order.end(), number) == order.end()) order.push_back(number);
  };
  for (const std::string& name : backends)
    add(name == "flash"       ? at::SDPBackend::flash_attention
        : name == "efficient" ? at::SDPBackend::efficient_attention
        : name == "cudnn"     ? at::SDPBackend::cudnn_attention
                              : at::SDPBackend::math);
  for (const at::SDPBackend backend : context.sDPPriorityOrder()) add(backend);  // the order has all of them
  context.setSDPPriorityOrder(order);
}

void set_up_process(const TrainerConfig& trainer, const comm::Environment& environment) {
  std::signal(SIGXFSZ,
              SIG_IGN);  // exceeding a file size limit is then a write error, as a full disk is
  if (trainer.deterministic) make_deterministic();
  if (trainer.tf32) allow_tf32();
  if (!trainer.attention_backends.empty()) prefer_attention(trainer.attention_backends);
  at::set_num_threads(choose_num_threads(trainer, environment));
  choose_device(trainer, environment);
}

Summary run(RunConfig run, const Registry& registry, const comm::Environment& environment,
            const TrainerOutput& output, TrainerStart start) {
  if (environment.rank == 0) log_report(run, output.logger);
  set_up_process(run.trainer, environment);
  const bool goes_on = start.resume || environment.restart_count > 0;
  const std::unique_ptr<Task> task = registry.make(run.model, run.data, resumed_run(run.trainer, goes_on));
  const comm::CommunicatorPtr comm = join_group(run.trainer, environment, output.logger);
  std::optional<Trainer> trainer;
  try {
    if (start.joined) start.joined();
    start.launched_run = launched_run();
    start.memory = HostFolders::join(comm, memory_folder());
    if (run.trainer.save_in_memory_every_steps > 0 && !start.memory && environment.rank == 0)
      output.logger.warning(
          "trainer.save_in_memory_every_steps: no effect without --max-restarts of tessera's launcher, on "
          "one host or by ssh");
    continue_after_restart(run, start, environment.restart_count, *comm);

    InitOptions init;
    init.device = comm->device();
    init.local_rank = environment.local_rank;
    trainer.emplace(std::move(run), *task, comm, init, output, std::move(start));
    return trainer->run();
  } catch (const std::exception& error) {
    comm::leave_because_of(error, *comm);
    throw;
  }
}

}  // namespace tessera::train
