#!/usr/bin/env bash
# Installs actionlint, a linter of GitHub workflows, into DIRECTORY/actionlint unless it is there already. Prints the path of the program. Needs Go.
#
#   tests/install-actionlint.sh DIRECTORY
set -euo pipefail
. "$(dirname "$0")/install-tools.sh"
version=v1.7.7
directory=${1:?usage: install-actionlint.sh DIRECTORY}/actionlint
program=$directory/actionlint
lock "$directory"
if [ ! -x "$program" ] || [ "$(cat "$directory/installed" 2>/dev/null)" != "$version" ]; then
  echo "installing actionlint $version into $directory" >&2
  must_have_go
  mkdir -p "$directory"
  GOFLAGS=-mod=mod GOBIN=$(realpath "$directory") go install "github.com/rhysd/actionlint/cmd/actionlint@$version" >&2
  echo "$version" >"$directory/installed"
fi
echo "$program"
