#include "train/run.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "comm/nccl_plugin.h"
#include "core/cuda_plugin.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::train {
namespace {

// Throws Error where there is no plugin, or no CUDA library it could use.
int num_cuda_devices() {
  return reinterpret_cast<decltype(&tessera_cuda_num_devices)>(
      cuda_plugin_symbol("tessera_cuda_num_devices"))();
}

bool has_cuda_for(const comm::Environment& environment) {
  try {
    return num_cuda_devices() >= environment.local_world_size;
  } catch (const Error&) {
    return false;
  }
}

void log_report(const RunConfig& run, const Logger& logger) {
  for (const std::string& line : run.report.warnings) logger.warning(line);
  for (const std::string& line : run.report.resolved) logger.info(line);
}

void check_backend(const TrainerConfig& trainer, at::Device device) {
  if (trainer.backend == "nccl" && device.is_cpu())
    throw ConfigError(
        "comm.backend: found \"nccl\", which moves CUDA tensors, but the ranks train on the CPU; "
        "expected \"auto\", \"shm\" or \"gloo\"");
  if ((trainer.backend == "gloo" || trainer.backend == "shm") && !device.is_cpu())
    throw ConfigError(str("comm.backend: found \"", trainer.backend,
                          "\", which moves CPU tensors, but trainer.device is \"cuda\"; "
                          "expected \"auto\" or \"nccl\""));
}

}  // namespace

static at::Device find_device(const TrainerConfig& trainer, const comm::Environment& environment) {
  if (trainer.device == "cpu" ||
      (trainer.device == "auto" && (trainer.backend == "gloo" || trainer.backend == "shm")))
    return at::kCPU;
  const at::Device cuda(at::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank));
  if (trainer.device == "auto") return has_cuda_for(environment) ? cuda : at::Device(at::kCPU);
  try {
    const int num_devices = num_cuda_devices();
    if (num_devices >= environment.local_world_size) return cuda;
    throw Error(
        str("this host has ", num_devices, " CUDA devices for ", environment.local_world_size, " ranks"));
  } catch (const Error& error) {
    throw ConfigError(
        str("trainer.device: found \"cuda\", but ", error.what(), "; expected \"cpu\" or \"auto\" here"));
  }
}

at::Device choose_device(const TrainerConfig& trainer, const comm::Environment& environment) {
  const at::Device device = find_device(trainer, environment);
  check_backend(trainer, device);
  return device;
}

int choose_num_threads(const TrainerConfig& trainer, const comm::Environment& environment) {
  if (trainer.num_threads > 0) return static_cast<int>(trainer.num_threads);
  return std::max(
      1, static_cast<int>(std::thread::hardware_concurrency()) / std::max(1, environment.local_world_size));
}

comm::CommunicatorPtr join_group(const TrainerConfig& trainer, const comm::Environment& environment,
                                 at::Device device, const Logger& logger) {
  comm::Options options;
  options.backend = trainer.backend;
  options.cuda = device.is_cuda();
  options.log = logger;
  options.timeout = std::chrono::milliseconds(std::llround(trainer.timeout_s * 1e3));
  options.rendezvous_timeout = std::chrono::milliseconds(std::llround(trainer.rendezvous_timeout_s * 1e3));
  return comm::connect(environment, options);
}

void make_deterministic() {
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // cuBLAS reads it at its first use
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
}

at::Device set_up_process(const TrainerConfig& trainer, const comm::Environment& environment) {
  std::signal(SIGXFSZ,
              SIG_IGN);  // a limit of file sizes is an error of the write that meets it, as a full disk is
  if (trainer.deterministic) make_deterministic();
  at::set_num_threads(choose_num_threads(trainer, environment));
  return choose_device(trainer, environment);
}

Summary run(RunConfig run, const Registry& registry, const comm::Environment& environment,
            const TrainerOutput& output, TrainerStart start) {
  if (environment.rank == 0) log_report(run, output.logger);
  const at::Device device = set_up_process(run.trainer, environment);
  const std::unique_ptr<Task> task = registry.make(run.model, run.data);
  const comm::CommunicatorPtr comm = join_group(run.trainer, environment, device, output.logger);
  if (start.joined) start.joined();

  InitOptions init;
  init.device = device;
  init.local_rank = environment.local_rank;
  Trainer trainer(std::move(run), *task, comm, init, output, std::move(start));
  return trainer.run();
}

}  // namespace tessera::train
