#!/bin/sh
# Runs Tessera out of this folder with the libtorch of the Python at hand:
#   ./run.sh train configs/fashion_mnist.json --nproc 2      the command `tessera`
#   ./run.sh --with PROGRAM [ARGUMENT...]                    another program, in the same environment
# PYTHON names the Python that has torch (default: python3). Needs a shell, that Python, and nothing else.
set -eu

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
here=$(CDPATH='' cd -- "$here" && pwd)
python=${PYTHON:-python3}

fail() {
  echo "error: $*" >&2
  exit 1
}

command -v "$python" >/dev/null 2>&1 ||
  fail "$python is no program here: expected a Python with torch @TORCH@; set PYTHON to one, or install it (pip install torch==@TORCH_FULL@)"
# Prints the libraries' folders, or fails with one line.
libraries=$("$python" -B "$here/lib/find_torch.py" @TORCH@) || exit 1

LD_LIBRARY_PATH="$libraries:$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
TESSERA_BUNDLE_DIR=$here
export LD_LIBRARY_PATH TESSERA_BUNDLE_DIR
PATH="$here/bin:$PATH"
export PATH

if [ "${1:-}" = --with ]; then
  shift
  exec "$@"
fi
exec "$here/bin/tessera" "$@"
