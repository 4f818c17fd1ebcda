#!/usr/bin/env bash
# Builds a program into DIRECTORY/grafana-schema that checks dashboards against the types of Grafana's SDK, unless it is there already. Prints its path.
# Needs Go.
#
#   tests/install-grafana-schema.sh DIRECTORY
set -euo pipefail
. "$(dirname "$0")/install-tools.sh"
module=$(realpath "$(dirname "$0")")/grafana-schema
directory=${1:?usage: install-grafana-schema.sh DIRECTORY}/grafana-schema
lock "$directory"
mkdir -p "$directory"
program=$(realpath "$directory")/grafana-schema
if [ ! -x "$program" ] || ! cat "$module/go.mod" "$module/main.go" | cmp -s - "$directory/installed"; then
  echo "building grafana-schema into $directory" >&2
  must_have_go
  (cd "$module" && go build -trimpath -o "$program" .) >&2
  cat "$module/go.mod" "$module/main.go" >"$directory/installed"
fi
echo "$program"
