#!/usr/bin/env bash
# Makes the environment (.venv at the repository root), then runs ruff, mypy and pytest.
# Usage: bash tests/run.sh [--all] [pytest arguments, e.g. -k plan]
# Without --all or a -m of your own, the tests marked `full` are left out: the larger cases of the grids.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cut=(-m "not full")
arguments=()
for argument in "$@"; do
  case $argument in
    --all) cut=() ;;
    -m | -m?*) cut=() arguments+=("$argument") ;;
    *) arguments+=("$argument") ;;
  esac
done

# Debian's packages (Slurm, ssh, ...) come while pip works: only tests marked `full` use them.
[ ${#cut[@]} -ne 0 ] || bash tests/install_debian.sh &
debian=$!
# For a part below: `--version` is pytest's, and this makes the environment of the lowest versions.
[ "${cut[*]}${arguments[*]}" ] || bash tests/lowest.sh --version &
lowest=$!
bash examples/make_venv.sh test,demo
wait "$debian" || echo "no packages from Debian: tests that need them skip themselves" >&2
# shellcheck disable=SC1091
source .venv/bin/activate

# Every rank imports the package, which is to be compiled once and not in each of a thousand processes.
unset PYTHONDONTWRITEBYTECODE
# One thread per process: a test runs up to four ranks on two cores, and more threads only get in each other's way.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false

ruff check .
ruff format --check .
nice -n 19 mypy & # beside the first tests
types=$!
if [ ${#arguments[@]} -ne 0 ]; then
  wait "$types"
  exec pytest -q "${cut[@]}" "${arguments[@]}"
fi
wait "$lowest" || echo "no environment of the lowest versions yet: see the end of the log" >&2

# The whole suite goes in two lanes side by side, which take parts of one row from both of its ends, and so end together.
# Tests of clusters, in front, wait much, for deadlines and for processes to start, and have bounds on seconds; all
# others compute, and have the time that those leave: Ray runs its ranks at nice 15.
docs="tests/docs tests/test_packaging.py tests/test_finetune.py tests/test_quickstart.py"
parts=("tests/bench/test_calls.py tests/faults tests/group" "tests/cluster" "$docs")
# Each process has a cluster of its own: few tests share that of others, and many have the machine of two lanes.
[ ${#cut[@]} -eq 0 ] || parts=("${parts[0]} $docs" "tests/cluster")
read -ra apart <<<"${parts[*]}"
[ ${#cut[@]} -ne 0 ] || parts+=("tests/lowest.sh --short")
computing=("tests/checkpoint tests/data tests/models" "tests/distributed")
read -ra known <<<"${computing[*]}"
parts+=("${computing[0]}" "tests ${apart[*]/#/--ignore=} ${known[*]/#/--ignore=}" "${computing[1]}")

scratch=$(mktemp -d)
log=$scratch/log
part() {
  case $1 in
    *.sh) exec bash "$@" ;;
    tests | tests/checkpoint | tests/distributed) exec nice -n 19 pytest -q "${cut[@]}" -p no:cacheprovider "$@" ;;
    *) exec pytest -q "${cut[@]}" -p no:cacheprovider "$@" ;;
  esac
}
lane() { # lane INDEX...: those that the other lane has not taken
  local failed=0 child index words
  trap 'kill "${child:-}" 2>/dev/null; exit 143' TERM
  trap 'kill "${child:-}" 2>/dev/null; exit 130' INT # a child by `&` ignores SIGINT
  for index in "$@"; do
    mkdir "$scratch/$index" 2>/dev/null || continue
    read -ra words <<<"${parts[$index]}"
    part "${words[@]}" &
    child=$!
    wait "$child" || failed=$?
  done
  return "$failed"
}
backwards=()
for index in "${!parts[@]}"; do backwards=("$index" "${backwards[@]}"); done
lane "${backwards[@]}" >"$log" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null; rm -rf "$scratch"' EXIT
failed=0
lane "${!parts[@]}" || failed=$?
wait "$others" || failed=$?
wait "$types" || { echo "mypy has found errors: see above" >&2 && failed=1; }
for index in "${!parts[@]}"; do
  [ -d "$scratch/$index" ] || { echo "not run: ${parts[$index]}" >&2 && failed=1; }
done
trap 'rm -rf "$scratch"' EXIT
printf '\nbeside them:\n'
cat "$log"
exit "$failed"
