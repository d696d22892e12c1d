#!/usr/bin/env bash
# Makes the environment (.venv at the repository root), then runs ruff, mypy and pytest.
# Usage: bash tests/run.sh [--all] [pytest arguments, e.g. -k plan or -m gpu]
# Without --all or a -m of your own, the tests marked `full` are left out: the larger cases of the grids.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash examples/make_venv.sh test,demo
# shellcheck disable=SC1091
source .venv/bin/activate

# One thread per process: a test runs up to four ranks on two cores, and more threads only get in each other's way.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false

ruff check .
ruff format --check .
mypy

cut=(-m "not full")
arguments=()
for argument in "$@"; do
  case $argument in
    --all) cut=() ;;
    -m | -m?*) cut=() arguments+=("$argument") ;;
    *) arguments+=("$argument") ;;
  esac
done
pytest -q "${cut[@]}" "${arguments[@]}"
