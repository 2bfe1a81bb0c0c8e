#include "core/environment/environment_schemes.h"

namespace tessera {

const EnvironmentScheme& torchrun_scheme() {
  static const EnvironmentScheme scheme = {
      .launcher = "torchrun",
      .rank = {"RANK"},
      .world_size = {"WORLD_SIZE"},
      .local_rank = {"LOCAL_RANK"},
      .local_world_size = {"LOCAL_WORLD_SIZE"},
      .mark = {"TORCHELASTIC_RUN_ID", "TESSERA_RUN_ID", "GROUP_RANK", "NODE_RANK", "CROSS_RANK"},
      .advice = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or unset them"};
  return scheme;
}

std::span<const EnvironmentScheme> other_schemes() {
  static const EnvironmentScheme schemes[] = {
      {.launcher = "Open MPI",
       .rank = {"OMPI_COMM_WORLD_RANK"},
       .world_size = {"OMPI_COMM_WORLD_SIZE"},
       .local_rank = {"OMPI_COMM_WORLD_LOCAL_RANK"},
       .local_world_size = {"OMPI_COMM_WORLD_LOCAL_SIZE"},
       .hosts = {"SLURM_JOB_NODELIST"},
       .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
       .advice = "start the ranks by mpirun, or unset the variables OMPI_COMM_WORLD_*"},
      // Horovod's Gloo launcher; over MPI the ranks have MPI's variables.
      {.launcher = "Horovod",
       .rank = {"HOROVOD_RANK"},
       .world_size = {"HOROVOD_SIZE"},
       .local_rank = {"HOROVOD_LOCAL_RANK"},
       .local_world_size = {"HOROVOD_LOCAL_SIZE"},
       .job = {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"},
       .advice = "start the ranks by horovodrun, or unset the variables HOROVOD_*",
       .pass_address = "MASTER_ADDR=HOST horovodrun ..., which passes its environment on"},
      {.launcher = "Hydra",  // the mpirun of MPICH, Intel MPI and MVAPICH
       .rank = {"PMI_RANK"},
       .world_size = {"PMI_SIZE"},
       .local_rank = {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
       .local_world_size = {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
       .mark = {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
       .hosts = {"SLURM_JOB_NODELIST"},
       .job = {"PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"},
       .advice = "start the ranks by mpirun, or unset the variables PMI_*",
       .pass_address = "mpirun -genv MASTER_ADDR HOST"},
      {.launcher = "Slurm",
       .rank = {"SLURM_PROCID"},
       .world_size = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"},
       .local_rank = {"SLURM_LOCALID"},
       .mark = {"SLURM_STEP_ID", "SLURM_STEPID"},  // not in a batch script, which is no rank
       .tasks_per_host = {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"},
       .host_index = {"SLURM_NODEID"},
       .hosts = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"},
       .job = {"SLURM_JOB_ID", "SLURM_STEP_ID"},
       .advice = "start the ranks by srun inside of the job, or unset the variables SLURM_*"},
      // srun sets these too where its plugin is pmi2.
      {.launcher = "PMI",
       .rank = {"PMI_RANK"},
       .world_size = {"PMI_SIZE"},
       .job = {"PMI_JOBID", "PBS_JOBID", "LSB_JOBID"},
       .advice = "start the ranks by mpirun, or unset the variables PMI_*"},
  };
  return schemes;
}

}  // namespace tessera
