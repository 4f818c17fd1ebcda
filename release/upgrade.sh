#!/usr/bin/env bash
# Tests the update from the last tagged version, and back:
#
#   * its example configurations are accepted by this version,
#   * a rolling update of pickers behind Envoy, which share state over NATS, loses no request,
#   * a recording that it makes is read by this version.
#
#   release/upgrade.sh [TAG]
#
# Needs what tests/run.sh needs.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${1:-$(git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null || true)}
if [ -z "$tag" ]; then
  echo "upgrade.sh: no tag is before this commit, so there is no version to update from" >&2
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone --quiet --no-local . "$work/previous"
git -C "$work/previous" checkout --quiet "$(git rev-parse "$tag^{commit}")"
(cd "$work/previous" && env -u CARGO_TARGET_DIR cargo build --release --locked --package attache --bin attache)
export PREVIOUS_ATTACHE=$work/previous/target/release/attache
echo "from $("$PREVIOUS_ATTACHE" version) of $tag"

cargo build --release --locked --package attache --bin attache
attache=${CARGO_TARGET_DIR:-$PWD/target}/release/attache
for file in "$work"/previous/examples/configs/*.yaml; do
  # Files that an example names are beside it.
  (cd "$work/previous" && "$attache" check "$file")
done
tests/run.sh --test e2e versions::
