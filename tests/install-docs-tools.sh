#!/usr/bin/env bash
# Installs MkDocs and its theme into DIRECTORY/docs unless they are there already. Prints that directory.
#
#   tests/install-docs-tools.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
tools=${1:?usage: install-docs-tools.sh DIRECTORY}/docs

install MkDocs "$here/../docs/requirements.txt" "$tools"
PYTHONPATH=$tools must_run python3 -m mkdocs --version
echo "$tools"
