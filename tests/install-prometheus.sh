#!/usr/bin/env bash
# Installs prometheus and promtool into DIRECTORY/prometheus unless they are there already. Prints that directory.
#
# Those of the machine are taken where there are some. Else those of Debian's package prometheus, which is unpacked and not installed.
#
#   tests/install-prometheus.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
tools=${1:?usage: install-prometheus.sh DIRECTORY}/prometheus

if [ ! -x "$tools/prometheus" ] || [ ! -x "$tools/promtool" ]; then
  rm -rf "$tools"
  mkdir -p "$tools"
  if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
    for program in prometheus promtool; do ln -s "$(command -v "$program")" "$tools/$program"; done
  else
    echo "installing Prometheus into $tools" >&2
    command -v apt-get >/dev/null || { echo "install-prometheus.sh: install prometheus and promtool: apt-get is missing" >&2; exit 1; }
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # Where the package lists are absent or old, they are read first.
    fetch() { (cd "$work" && apt-get download prometheus >&2); }
    fetch || { apt-get update >&2 && fetch; }
    dpkg-deb -x "$work"/prometheus_*.deb "$work/package"
    mv "$work/package/usr/bin/prometheus" "$work/package/usr/bin/promtool" "$tools"
  fi
fi
must_run "$tools/prometheus" --version
must_run "$tools/promtool" --version
echo "$tools"
