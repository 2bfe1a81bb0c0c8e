#!/bin/bash
# A batch job of Slurm with one rank on each of two hosts. srun starts the ranks, which find their place in Slurm's variables and meet on the
# first host of its list: no launcher is needed, and no address. A rank that fails ends the others (--kill-on-bad-exit).
#
#     sbatch examples/gallery/slurm.sh          from the root of the tree; gan.out then ends with
#     after 600 steps: pixels of made digits have mean -0.37 and deviation 0.72, those of real ones -0.39 and 0.75
#
# PYTHON, and another program as the job's argument, may be given:
# PYTHONPATH=build/python PYTHON=.deps/venv/bin/python sbatch examples/gallery/slurm.sh train.py
#SBATCH --job-name=gan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=gan.out
set -euo pipefail

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS" "${PYTHON:-python}" "${1:-examples/gallery/gan.py}"
