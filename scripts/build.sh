#!/bin/bash
# Configures if needed, then builds:  scripts/build.sh PRESET [TARGET...]
# PRESET is one of CMakePresets.json; without a TARGET everything but benchmarks and fuzzers is built. JOBS=N sets the number of compilers.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($# >= 1)) || fail "usage: scripts/build.sh release|debug|asan|tsan|fuzz [TARGET...]"
readonly PRESET="$1"
shift
case "$PRESET" in
  release) readonly DIR="build$TESSERA_BUILD_SUFFIX" ;;
  debug | asan | tsan | fuzz) readonly DIR="build-$PRESET$TESSERA_BUILD_SUFFIX" ;;
  *) fail "unknown preset $PRESET; there are release, debug, asan, tsan and fuzz" ;;
esac

# A file of libtorch C++ takes up to 2 GB to compile: no more compilers than cores, or than fit into memory.
default_jobs() {
  local cores memory_gb
  cores=$(nproc)
  memory_gb=$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)
  local fitting=$((memory_gb / 2 > 1 ? memory_gb / 2 : 1))
  echo $((cores < fitting ? cores : fitting))
}

# What CMake looks for and scripts/setup.sh installs. A folder that was configured with something else is configured anew, so
# that the build is the same whichever commands came before.
installed() {
  cat "$VENV"/{torch,nccl,cuda,python}.sha256 .deps/hdf5/built-from 2>/dev/null || true
  command -v nvcc /usr/local/cuda/bin/nvcc || true
}

# Ninja runs CMake again when a CMakeLists.txt has changed, but not when the presets have, the tree has moved, or what is installed
# has changed.
configured() {
  [[ -e $DIR/build.ninja && ! CMakePresets.json -nt $DIR/build.ninja ]] &&
    grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$ROOT" "$DIR/CMakeCache.txt" &&
    [[ -e $DIR/configured-with && $(<"$DIR/configured-with") == "$(installed)" ]]
}

configure() {
  cmake --preset "$PRESET" --fresh
  installed >"$DIR/configured-with"
  touch "$DIR/build.ninja"
}

configured || step "Configure ($PRESET)" "configure-$PRESET" configure

ninja_command=(ninja -C "$DIR" -j "${JOBS:-$(default_jobs)}" "$@")
if [[ $("${ninja_command[@]}" -n) == *"no work to do"* ]]; then
  exit 0
elif [[ -t 1 ]]; then
  "${ninja_command[@]}"  # shows its progress in one line
else
  step "Build ($PRESET)" "build-$PRESET" "${ninja_command[@]}"
fi
