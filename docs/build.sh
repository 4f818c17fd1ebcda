#!/usr/bin/env bash
# Builds the documentation site into target/site (or DIRECTORY). Every warning, such as a link without a target, is an error.
#
#   docs/build.sh [DIRECTORY]
#
# Installs MkDocs from PyPI into target/tools (or $ATTACHE_TOOLS) on first use. After that it needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(tests/install-docs-tools.sh "${ATTACHE_TOOLS:-$PWD/target/tools}")
export NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$tools
# Not --quiet: MkDocs counts only the warnings that it shows.
output=$(python3 -m mkdocs build --strict --site-dir "${1:-$PWD/target/site}" 2>&1) || { echo "$output" >&2; exit 1; }
