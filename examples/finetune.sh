#!/usr/bin/env bash
# Training over data, from nothing: makes .venv at the repository root, installs raysharding[demo,plot], runs finetune.py.
# Usage: bash examples/finetune.sh [--steps NUMBER] [--out DIRECTORY] [--device TYPE]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

bash "$here/make_venv.sh" demo,plot
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
exec "$here/../.venv/bin/python" "$here/finetune.py" "$@"
