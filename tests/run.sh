#!/usr/bin/env bash
# Makes the environment (.venv at the repository root), then runs ruff, mypy and pytest.
# Usage: bash tests/run.sh [pytest arguments, e.g. -k plan or -m gpu]
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
pytest -q "$@"
