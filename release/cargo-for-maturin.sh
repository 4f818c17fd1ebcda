#!/usr/bin/env bash
# cargo for maturin, which writes into the SBOM what cargo prints. The directory of the sources must not be in it, or a
# build elsewhere gives other files. SOURCE_DATE_EPOCH is for maturin alone: cargo compiles C code again when it changes.
# REAL_CARGO names cargo.
set -euo pipefail
unset SOURCE_DATE_EPOCH
root=$(dirname "$(dirname "$(realpath "$0")")")
"$REAL_CARGO" "$@" | sed --unbuffered "s#file://$root#file:///attache#g"
