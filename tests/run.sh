#!/usr/bin/env bash
# Makes the environment (.venv at the repository root), then runs ruff, mypy and pytest.
# Usage: bash tests/run.sh [--all] [pytest arguments, e.g. -k plan or -m gpu]
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
# For the last part of `later`: `--version` is pytest's, and this makes the environment of the lowest versions.
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
mypy
wait "$lowest" || echo "no environment of the lowest versions yet: see the end of the log" >&2

[ ${#arguments[@]} -eq 0 ] || exec pytest -q "${cut[@]}" "${arguments[@]}"

# The whole suite goes in two lanes side by side. Tests of clusters wait much, for deadlines and for processes to start,
# and have bounds on seconds; all others compute, and have the time that those leave: Ray runs its ranks at nice 15.
# The parts of `later`, in clusters of their own, are taken by the lane that ends first.
clusters=(tests/bench/test_calls.py tests/faults tests/group)
later=("tests/cluster" "tests/docs tests/test_packaging.py tests/test_finetune.py tests/test_quickstart.py")
[ ${#cut[@]} -ne 0 ] || later+=("tests/lowest.sh --short")
apart=("${clusters[@]}" tests/cluster tests/docs tests/test_packaging.py tests/test_finetune.py tests/test_quickstart.py)
scratch=$(mktemp -d)
log=$scratch/log
in_child() {
  "$@" &
  child=$!
  wait "$child"
}
part() {
  case $1 in
    *.sh) exec bash "$@" ;;
    *) exec pytest -q "${cut[@]}" -p no:cacheprovider "$@" ;;
  esac
}
lane() {
  local failed=0 child index words
  trap 'kill "${child:-}" 2>/dev/null; exit 143' TERM
  trap 'kill "${child:-}" 2>/dev/null; exit 130' INT # a child by `&` ignores SIGINT
  in_child "$@" || failed=$?
  for index in "${!later[@]}"; do
    mkdir "$scratch/$index" 2>/dev/null || continue # the other lane has it
    read -ra words <<<"${later[$index]}"
    in_child part "${words[@]}" || failed=$?
  done
  return "$failed"
}
lane nice -n 19 pytest -q "${cut[@]}" -p no:cacheprovider tests "${apart[@]/#/--ignore=}" >"$log" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null; rm -rf "$scratch"' EXIT
failed=0
lane pytest -q "${cut[@]}" "${clusters[@]}" || failed=$?
wait "$others" || failed=$?
for index in "${!later[@]}"; do
  [ -d "$scratch/$index" ] || { echo "not run: ${later[$index]}" >&2 && failed=1; }
done
trap 'rm -rf "$scratch"' EXIT
printf '\nbeside them, all tests but those of clusters:\n'
cat "$log"
exit "$failed"
