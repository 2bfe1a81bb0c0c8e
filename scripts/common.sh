# shellcheck shell=bash
# Sourced by the other scripts: one line a step on the terminal, the details in .deps/log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly ROOT="$PWD" LOG_DIR="$PWD/.deps/log"
mkdir -p "$LOG_DIR"

fail() {
  echo "error: $*" >&2
  exit 1
}

# TESSERA_TORCH, "2.15" or "2.15.0", chooses one of the sections [torch-...] of requirements.txt; the first is the default. Another one
# has folders of its own: .deps/venv-torch2.15, build-torch2.15 and, for the other presets, build-asan-torch2.15 and so on.
choose_torch() {
  local version
  TORCHES=$(sed -n 's/^# \[torch-\([0-9.]*\)\].*/\1/p' requirements.txt)
  TORCH=$(head -n 1 <<<"$TORCHES")
  TESSERA_BUILD_SUFFIX=""
  [[ -z ${TESSERA_TORCH:-} ]] && return
  for version in $TORCHES; do
    if [[ $TESSERA_TORCH == "$version" || $TESSERA_TORCH == "${version%.*}" ]]; then
      [[ $version == "$TORCH" ]] || TESSERA_BUILD_SUFFIX="-torch${version%.*}"
      TORCH=$version
      return
    fi
  done
  # shellcheck disable=SC2086  # one word a version
  fail "TESSERA_TORCH is \"$TESSERA_TORCH\"; expected one of" $TORCHES "(requirements.txt)"
}
choose_torch
readonly TORCH TORCHES
export VENV="$ROOT/.deps/venv$TESSERA_BUILD_SUFFIX" TESSERA_BUILD_SUFFIX  # CMakePresets.json reads the suffix

# step LABEL LOG_NAME COMMAND...: prints "LABEL ... 12 s"; when COMMAND fails, the end of its log and its name.
step() {
  local label="$1" log="$LOG_DIR/$2$TESSERA_BUILD_SUFFIX.log" start=$SECONDS status=0
  shift 2
  printf '%s ... ' "$label"
  set +e  # not "|| status=$?": inside COMMAND, a function, every failure must still stop it
  (set -e; "$@") >"$log" 2>&1 </dev/null
  status=$?
  set -e
  if ((status == 0)); then
    echo "$((SECONDS - start)) s"
    return 0
  fi
  echo "failed"
  tail -n 40 "$log" >&2
  fail "$label: exit code $status; the whole log is ${log#"$ROOT"/}"
}
