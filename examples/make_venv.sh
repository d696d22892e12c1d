#!/usr/bin/env bash
# Makes .venv at the repository root and installs raysharding in it, editable, with the tested versions.
# Does nothing where the same extras were installed from the same pyproject.toml and constraints before.
# Usage: bash examples/make_venv.sh EXTRAS   (e.g. demo, or test,demo)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:?usage: make_venv.sh EXTRAS}

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "raysharding needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON=/path/to/python3.11." >&2
  exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv

stamp=.venv/.raysharding-$extras
inputs=$(cat pyproject.toml tests/constraints.txt; pwd)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$inputs" ]; then
  echo "installing raysharding[$extras] into .venv"
  .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c tests/constraints.txt -e ".[$extras]" </dev/null
  printf '%s\n' "$inputs" >"$stamp"
fi
