#!/bin/bash
# Runs the suite of a finished build with ctest:  scripts/test.sh PRESET [CTEST ARGUMENT...]
# The report ends with ctest's summary, which is kept in .deps/log/ctest-PRESET.log as well.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($# >= 1)) || fail "usage: scripts/test.sh release|debug|asan|tsan [CTEST ARGUMENT...]"
readonly PRESET="$1"
shift
# ctest's processors are halves of a core: a test takes two, or one if it waits more than it computes (cmake/Targets.cmake). Two
# more than there are keep the cores busy while tests read and wait.
parallel=$((2 * $(nproc) + 2))
ctest --preset "$PRESET" --parallel "${CTEST_PARALLEL_LEVEL:-$parallel}" --no-tests=error "$@" 2>&1 </dev/null |
  tee "$LOG_DIR/ctest-$PRESET$TESSERA_BUILD_SUFFIX.log"
