// run: from a configuration to a trained model, for one rank. What `tessera
// train` does after its command line is read.
#pragma once

#include "comm/init.h"
#include "train/registry.h"
#include "train/trainer.h"

namespace tessera::train {

/// Collective. Loads the data, joins the group `environment` describes, trains and evaluates. `run` was read
/// for environment.world_size ranks. Ranks other than 0 write nothing to output.display; their logger is
/// used. Throws ConfigError, DataError or CommError, each one line.
Summary run(RunConfig run, const Registry& registry, const comm::Environment& environment,
            const TrainerOutput& output, TrainerStart start = {});

/// Local. The device of this rank: comm::choose_device() of trainer.device and comm.backend. Throws
/// ConfigError when CUDA is asked for and not there, or comm.backend cannot move its tensors.
at::Device choose_device(const TrainerConfig& trainer, const comm::Environment& environment);

/// Collective. The group of `environment`, over comm.backend, for tensors on choose_device(). Throws
/// CommError.
comm::CommunicatorPtr join_group(const TrainerConfig& trainer, const comm::Environment& environment,
                                 const Logger& logger);

/// Local. How a rank begins, before anything runs on its device: trainer.deterministic, choose_num_threads(),
/// and SIGXFSZ is ignored, so that a file that may not grow is an error and no end of the process. Throws
/// what choose_device() does, before the data are loaded.
void set_up_process(const TrainerConfig& trainer, const comm::Environment& environment);

/// Local. For trainer.deterministic: as torch.use_deterministic_algorithms(True), for the whole process and
/// for good. To be called before anything runs on CUDA.
void make_deterministic();

/// Local. trainer.num_threads, or this host's cores (as far as this process may
/// use them) over its ranks; at least 1.
int choose_num_threads(const TrainerConfig& trainer, const comm::Environment& environment);

}  // namespace tessera::train
