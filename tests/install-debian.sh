#!/usr/bin/env bash
# Makes a minimal Debian 12 in DIRECTORY/debian unless it is there already. Prints that directory. Needs root, and installs debootstrap with apt-get
# if it is missing.
#
#   tests/install-debian.sh DIRECTORY
set -euo pipefail
root=${1:?usage: install-debian.sh DIRECTORY}/debian
if [ ! -e "$root.installed" ]; then
  [ "$(id -u)" = 0 ] || { echo "install-debian.sh: a root of another system needs the rights of root" >&2; exit 1; }
  if ! command -v debootstrap >/dev/null; then
    apt-get update >&2
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends debootstrap >&2
  fi
  echo "making a minimal Debian in $root" >&2
  rm -rf "$root"
  debootstrap --variant=minbase bookworm "$root" >&2
  touch "$root.installed"
fi
echo "$root"
