#!/usr/bin/env bash
# Installs jsonschema, a validator of JSON Schemas, into DIRECTORY/jsonschema unless it is there already. Prints that directory.
#
#   tests/install-jsonschema.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
tools=${1:?usage: install-jsonschema.sh DIRECTORY}/jsonschema

install jsonschema "$here/jsonschema-requirements.txt" "$tools" --only-binary=:all:
PYTHONPATH=$tools must_run python3 -c "import jsonschema"
echo "$tools"
