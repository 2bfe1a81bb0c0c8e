#!/bin/bash
# Runs each fuzzer of build-fuzz for SECONDS_EACH seconds, from seeds that are real checkpoints. What a run finds new is kept
# in build-fuzz/corpus, and the next one starts from it; an input that crashes is kept in build-fuzz/crashes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
# shellcheck source=scripts/common.sh
source scripts/common.sh
cd "build-fuzz$TESSERA_BUILD_SUFFIX"

seeds() {
  local folder world
  folder=$(mktemp -d)
  for world in 1 2 3; do
    ./consolidate_tool sample "$folder/$world" "$world"
    cp "$folder/$world/step/manifest.json" "corpus/manifest_fuzz/$world.json"
    ./consolidate_tool convert "$folder/$world" "corpus/safetensors_fuzz/$world.safetensors" safetensors fp32 >/dev/null
  done
  rm -r "$folder"
  grep -oh '"[a-z_]\{2,24\}"' corpus/manifest_fuzz/1.json | sort -u | sed 's/"/\\"/g; s/.*/"&"/' >manifest_fuzz.dict
  printf '"\\"%s\\""\n' F32 BF16 I64 BOOL dtype shape data_offsets __metadata__ >safetensors_fuzz.dict
  echo '# no words' >folder_fuzz.dict
  "$VENV/bin/python" -B ../tests/checkpoint/fuzz/torch_seeds.py corpus/pickle_fuzz corpus/torch_file_fuzz
  printf '"%s"\n' OrderedDict torch._utils _rebuild_tensor_v2 FloatStorage storage cpu builtins getattr copyreg _reconstructor PK\\x01\\x02 \
    PK\\x03\\x04 PK\\x05\\x06 >torch_file_fuzz.dict
  cp torch_file_fuzz.dict pickle_fuzz.dict
}

mkdir -p corpus/{manifest,safetensors,folder,pickle,torch_file}_fuzz crashes
seeds
TMPDIR=$(mktemp -d -p /dev/shm tessera_fuzz_XXXXXX)  # folder_fuzz rewrites its files for every input, and a crash leaves them
export TMPDIR
trap 'rm -r "$TMPDIR"' EXIT
for fuzzer in manifest_fuzz safetensors_fuzz folder_fuzz pickle_fuzz torch_file_fuzz; do
  printf '%s ... ' "$fuzzer"
  if ! "./$fuzzer" -max_total_time="${SECONDS_EACH:-20}" -rss_limit_mb=4096 -dict="$fuzzer.dict" -artifact_prefix="crashes/$fuzzer-" \
    "corpus/$fuzzer" >"$fuzzer.log" 2>&1; then
    echo "failed"
    tail -n 40 "$fuzzer.log" >&2
    exit 1
  fi
  grep -o 'Done [0-9]* runs in [0-9]* second' "$fuzzer.log"
done
