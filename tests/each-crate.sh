#!/usr/bin/env bash
# Checks that each crate and its tests compile alone, as `cargo test -p CRATE` compiles them. Together with the others, a crate can use features of
# dependencies that only another crate enables.
#
#   tests/each-crate.sh [CRATE…]
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- $(sed -n 's/^name = "\(attache-.*\)"/\1/p' src/*/Cargo.toml)

failed=()
for crate in "$@"; do
  echo "$crate"
  cargo check --release --locked --quiet --package "$crate" --all-targets || failed+=("$crate")
done
[ ${#failed[@]} -eq 0 ] || { echo "these do not compile alone: ${failed[*]}" >&2; exit 1; }
