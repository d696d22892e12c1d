#!/usr/bin/env bash
# Builds the site into docs/site; a broken link or a missing docstring is an error. `bash docs/build.sh serve` shows it as you write.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${VIRTUAL_ENV:-}" ] || { bash examples/make_venv.sh docs && source .venv/bin/activate; }
exec mkdocs "${1:-build}" --strict --config-file docs/mkdocs.yml
