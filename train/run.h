// run(): trains one rank of a run from its configuration. `tessera train` calls it after reading its command
// line.
#pragma once

#include "comm/init/init.h"
#include "train/task/registry.h"
#include "train/trainer.h"

namespace tessera::train {

/// Collective. Loads the data, joins the process group that `environment` describes, trains and evaluates.
/// `run` must have been read for environment.world_size ranks. Only rank 0 writes to output.display; every
/// rank uses its logger. Throws ConfigError, DataError or CommError, with one line each.
Summary run(RunConfig run, const Registry& registry, const comm::Environment& environment,
            const TrainerOutput& output, TrainerStart start = {});

/// The device of this rank, by trainer.device and comm.backend (comm::choose_device). Throws
/// ConfigError if CUDA is asked for and not available, or if comm.backend does not support it.
at::Device choose_device(const TrainerConfig& trainer, const comm::Environment& environment);

/// Collective. Joins the process group of `environment` over comm.backend, for tensors on choose_device().
/// Throws CommError.
comm::CommunicatorPtr join_group(const TrainerConfig& trainer, const comm::Environment& environment,
                                 const Logger& logger);

/// Process-wide settings, to be made before anything runs on the device: applies
/// trainer.deterministic and choose_num_threads(), and ignores SIGXFSZ, so that exceeding a file size limit
/// is a write error and does not end the process. Throws what choose_device() throws.
void set_up_process(const TrainerConfig& trainer, const comm::Environment& environment);

/// Is for trainer.deterministic. Does what torch.use_deterministic_algorithms(True) does, for the whole
/// process. Must be called before anything runs on CUDA.
void make_deterministic();

/// Is for trainer.tf32. Does what torch.backends.cuda.matmul.allow_tf32 = True and the same of cudnn do, for
/// the whole process. Changes nothing on the CPU.
void allow_tf32();

/// Is for trainer.attention_backends. Sets the kernels that scaled_dot_product_attention may take in this
/// process, the preferred first; all others are off. `backends`: at least one of flash, efficient, cudnn and
/// math. Must be called before anything runs on CUDA.
void prefer_attention(const std::vector<std::string>& backends);

/// Trainer.num_threads; if that is 0, this host's cores divided by its ranks, at least 1. Throws
/// ConfigError for a number that is far above the host's cores.
int choose_num_threads(const TrainerConfig& trainer, const comm::Environment& environment);

}  // namespace tessera::train
