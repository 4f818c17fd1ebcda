#!/usr/bin/env bash
# Writes the image's name, the version and the address of the documentation into every file that has them: the version of Cargo.toml, the names of
# release/names.env.
#
#   release/names.sh            rewrites the files
#   release/names.sh --check    lists the files that differ, and fails if there are any
set -euo pipefail
cd "$(dirname "$0")/.."
. release/names.env
version=$(release/version.sh)

# A name ends before `/attache`, and a tag is a version.
image="s#[A-Za-z0-9.:-]+(/[A-Za-z0-9._-]+)*/attache:[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.+-]*#$REGISTRY/attache:$version#g"
chart="s#^(version|appVersion): .*#\1: $version#"
runbook="s#^( *runbook_url: ).*(docs/how-to/alerts\.md\#)#\1$DOCUMENTATION\2#"
registry="s#^(    registry:) [^ ]+\$#\1 $REGISTRY#"

wrong=0
apply() { # FILE EXPRESSION
  local now
  now=$(sed -E "$2" "$1"; printf x)
  if [ "$now" != "$(cat "$1"; printf x)" ]; then
    if [ "${check:-}" ]; then
      echo "$1 has another name or version than release/names.env and Cargo.toml: run release/names.sh" >&2
      wrong=1
    else
      printf %s "${now%x}" >"$1"
    fi
  fi
}

case "${1:-}" in
  --check) check=1 ;;
  "") ;;
  *) echo "usage: release/names.sh [--check]" >&2; exit 64 ;;
esac
while IFS= read -r file; do
  apply "$file" "$image"
done < <(git ls-files -- README.md docs examples release ':!release/names.sh' | xargs grep -d skip -lE '/attache:[0-9]+\.')
for file in examples/kubernetes/helm/*/Chart.yaml; do apply "$file" "$chart"; done
for file in examples/kubernetes/helm/*/values.yaml; do apply "$file" "$registry"; done
for file in examples/prometheus/alerts.yaml examples/prometheus/tests/alerts.yaml; do apply "$file" "$runbook"; done
exit "$wrong"
