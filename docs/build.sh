#!/usr/bin/env bash
# Builds the site into docs/site (or DIRECTORY). A broken link, a page that is missing and a docstring that cannot be read
# are errors. It needs no network once the environment is there, and the site asks no host but its own.
# Usage: bash docs/build.sh [build [--site-dir DIRECTORY]]; `bash docs/build.sh serve` shows the pages as you write them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC1091
[ -n "${VIRTUAL_ENV:-}" ] || { bash examples/make_venv.sh docs && source .venv/bin/activate; }
# The theme's authors print a notice on every build.
export NO_MKDOCS_2_WARNING=1
exec mkdocs "${1:-build}" --strict --config-file docs/mkdocs.yml "${@:2}"
