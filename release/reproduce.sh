#!/usr/bin/env bash
# Builds the release a second time, in another directory, and compares the files.
#
#   release/reproduce.sh DIST
set -euo pipefail
dist=$(realpath "${1:?usage: release/reproduce.sh DIST}")
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git clone --quiet --no-local . "$copy/attache"
git -C "$copy/attache" checkout --quiet "$(git rev-parse HEAD)"
env -u CARGO_TARGET_DIR -u RELEASE_KEY DIST="$copy/dist" ATTACHE_TOOLS="${ATTACHE_TOOLS:-$PWD/target/tools}" "$copy/attache/release/build.sh"
diff "$dist/SHA256SUMS" "$copy/dist/SHA256SUMS"
echo "both builds gave equal files"
