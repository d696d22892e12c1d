#!/usr/bin/env bash
# The main job from nothing: makes .venv at the repository root, installs raysharding[demo], runs quickstart.py.
# Usage: bash examples/quickstart.sh [arguments of quickstart.py, e.g. --out DIRECTORY]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

bash "$here/make_venv.sh" demo
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
exec "$here/../.venv/bin/python" "$here/quickstart.py" "$@"
