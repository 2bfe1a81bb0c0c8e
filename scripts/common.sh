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

# step LABEL LOG_NAME COMMAND...: prints "LABEL ... 12 s"; when COMMAND fails, the end of its log and its name.
step() {
  local label="$1" log="$LOG_DIR/$2.log" start=$SECONDS status=0
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
