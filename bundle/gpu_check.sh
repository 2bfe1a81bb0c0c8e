#!/bin/sh
# Checks Tessera on this machine's GPU in one command of less than 10 minutes: the tests that need a GPU, step times beside
# PyTorch's, the kernels' bandwidths, memory beside the formula, and a table at the end.
#   ./gpu_check.sh [--cpu] [--minutes 9.5] [--only tests|kernels|steps] [--json FILE]
# Exit code 0: everything passed; 1: something failed; 2: there is no GPU (--cpu runs small shapes without one).
set -eu
case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
here=$(CDPATH='' cd -- "$here" && pwd)
exec "$here/run.sh" --with "${PYTHON:-python3}" -B "$here/lib/gpu_check.py" "$@"
