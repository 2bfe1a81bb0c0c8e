#!/bin/bash
# Looks at the C++ sources with clang-tidy (.clang-tidy):  scripts/lint.sh [FILE...]   all without FILE
# Prints what it finds and fails if that is anything. tests/architecture checks layout, Python and shell.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

readonly BUILD="$ROOT/build-lint$TESSERA_BUILD_SUFFIX"
# Clang reads no precompiled header of GCC's. A file is looked at as a part of its joined file, unless FILEs are named.
joined=ON
(($# > 0)) && joined=OFF
step "Configure (lint)" configure-lint cmake -S "$ROOT" -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_VENV="$VENV" -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DTESSERA_JOIN_SOURCES=$joined -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_BENCHMARKS=OFF

# The one header that clang-tidy's package lacks.
mkdir -p "$BUILD/omp"
ln -sf "$(c++ -print-file-name=include/omp.h)" "$BUILD/omp/omp.h"

sources() {
  if (($# > 0)); then
    realpath "$@"
  else
    sed -n 's/^ *"file": "\(.*\.c[xc]*\)",*$/\1/p' "$BUILD/compile_commands.json" | grep -v '/cmake/empty.cc$'
  fi
}
sources "$@" | xargs -P "${JOBS:-$(nproc)}" -n 1 "$VENV/bin/clang-tidy" -quiet -p "$BUILD" \
  --extra-arg="-isystem$BUILD/omp" 2>"$LOG_DIR/lint.log" ||
  fail "clang-tidy has found something (above); its own messages are in $LOG_DIR/lint.log"
