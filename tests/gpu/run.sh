#!/usr/bin/env bash
# What runs first whenever a machine with a GPU is at hand: checks, what is unknown first, then benchmarks, in 8 minutes.
# Usage: [DEVICE=cuda|cpu|sim] [PYTHON=python3] [COMMIT=...] [BUDGET=480] [PARTS="sanity groups"] bash tests/gpu/run.sh OUT
# Needs python with torch and Ray on its path, and no network. OUT/record.txt and record.json have a line for each check
# as soon as it is known, OUT/PART.txt what a part has printed. The status is 0 only if every part has passed.
# With DEVICE=cpu the same runs on tiny sizes, in two to four minutes: rehearse a change of this before a GPU is at hand.
set -uo pipefail
out=$(mkdir -p "${1:?usage: run.sh OUT}" && cd "$1" && pwd) || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
device=${DEVICE:-cuda} python=${PYTHON:-python3} budget=${BUDGET:-480}
export RECORD=$out PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 OMP_NUM_THREADS=1
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_DEBUG=WARN
unset PYTHONDONTWRITEBYTECODE

# Runs a part with a limit of its own, and records how it has ended: part NAME SECONDS COMMAND...
part() {
  local name=$1 limit=$2 begun=$SECONDS status=255 left=$((budget - SECONDS))
  shift 2
  [[ -z ${PARTS:-} || " $PARTS " == *" $name "* ]] || return 0
  if ((left > 5)); then
    status=0
    # In the background, so that a signal to this script is heard while a part runs.
    PART=$name timeout -k 5 "$((limit < left ? limit : left))" "$python" -m "$@" >"$out/$name.txt" 2>&1 &
    child=$!
    wait "$child" || status=$?
  fi
  "$python" -m tests.gpu.record end "$out" "$name" "$((SECONDS - begun))" "$status" || failed=1
}

lane() {
  failed=0
  trap 'kill "${child:-}" 2>/dev/null; exit 143' TERM INT
  "$@"
  exit "$failed"
}

first() { part sanity 60 tests.gpu.sanity "$device"; }

# Lanes side by side, what is unknown first: a group's start is what takes time, and leaves the device idle.
equal() { part groups 200 tests.gpu.equal_checks "$device" 2 4 1; }
lost() { part lost-ranks 180 tests.gpu.lost_ranks "$device"; }
ranks() { part ranks 300 tests.gpu.rank_checks "$device"; }

# One after the other: they have the machine for themselves.
benchmarks() {
  local step=(tests.bench.step --device "$device") few=(--rounds 3 --steps 2) large=(--shape tiny)
  local load=(tests.bench.loading --device "$device" --world-size 1,2 --rounds 3 --timeout-s 60 --shared-network)
  local size=(--size-gib 0.02)
  [ "$device" != cuda ] || few=(--rounds 4 --steps 6) large=(--shape 1b) size=(--size-gib 2.5)
  part step 90 "${step[@]}" "${few[@]}" "${large[@]}"
  part load 90 "${load[@]}" "${size[@]}" --base auto --arms auto,local,read_threads_floor,pinned_floor
  part compiled 150 "${step[@]}" "${few[@]}" "${large[@]}" --arms ours,compiled,checkpointed
  part step-2 90 "${step[@]}" "${few[@]}" "${large[@]}" --world-size 2
  part save 60 tests.gpu.rank_checks "$device" check_asynchronous_save
  part generate 60 tests.bench.generation --device "$device" "${large[@]}"
  [ "$device" != cuda ] || part step-8b 120 "${step[@]}" --shape 8b --rounds 3 --steps 4 --arms compiled_checkpointed
}

SECONDS=0
"$python" -m tests.gpu.record begin "$out" "$device" || exit 1
status=0 lanes=()
trap 'kill "${lanes[@]}" 2>/dev/null; exit 143' TERM INT
for together in first "equal lost ranks" benchmarks; do
  lanes=()
  for one in $together; do
    lane "$one" &
    lanes+=($!)
  done
  for one in "${lanes[@]}"; do
    wait "$one" || status=1
  done
done
cat "$out/record.txt"
exit "$status"
