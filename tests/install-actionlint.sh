#!/usr/bin/env bash
# Installs actionlint, a linter of GitHub workflows, into DIRECTORY/actionlint unless it is there already. Prints the path of the program. Needs Go.
#
#   tests/install-actionlint.sh DIRECTORY
set -euo pipefail
version=v1.7.7
directory=${1:?usage: install-actionlint.sh DIRECTORY}/actionlint
program=$directory/actionlint
# Where Go is installed by its own instructions, also for shells that read no profile.
PATH=$PATH:/usr/local/go/bin
if [ ! -x "$program" ] || [ "$(cat "$directory/installed" 2>/dev/null)" != "$version" ]; then
  echo "installing actionlint $version into $directory" >&2
  mkdir -p "$directory"
  GOFLAGS=-mod=mod GOBIN=$(realpath "$directory") go install "github.com/rhysd/actionlint/cmd/actionlint@$version" >&2
  echo "$version" >"$directory/installed"
fi
echo "$program"
