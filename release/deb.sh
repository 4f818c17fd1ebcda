#!/usr/bin/env bash
# Makes the Debian package. Called by build.sh.
#
#   release/deb.sh PROGRAM LIBRARY TEXTS OUTPUT      TEXTS has the folders man and completions, and THIRD-PARTY-LICENCES.txt
set -euo pipefail
program=$1 library=$2 texts=$3 output=$4
cd "$(dirname "$0")/.."
. release/names.env
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

install -D -m 755 "$program" "$root/usr/bin/attache"
install -D -m 644 "$library" "$root/usr/lib/attache/libattache_envoy.so"
install -D -m 644 release/attache.service "$root/usr/lib/systemd/system/attache.service"
install -d "$root/etc/attache" "$root/usr/share/man/man1" "$root/usr/share/doc/attache/examples"
for page in "$texts"/man/*.1; do
  gzip -n9 <"$page" >"$root/usr/share/man/man1/$(basename "$page").gz"
done
install -D -m 644 "$texts/completions/attache.bash" "$root/usr/share/bash-completion/completions/attache"
install -D -m 644 "$texts/completions/_attache" "$root/usr/share/zsh/vendor-completions/_attache"
install -D -m 644 "$texts/completions/attache.fish" "$root/usr/share/fish/vendor_completions.d/attache.fish"
install -m 644 examples/configs/*.yaml envoy/*.yaml "$root/usr/share/doc/attache/examples"
gzip -n9 <CHANGELOG.md >"$root/usr/share/doc/attache/changelog.gz"
cat LICENSE "$texts/THIRD-PARTY-LICENCES.txt" >"$root/usr/share/doc/attache/copyright"
find "$root" -type f ! -name attache -exec chmod 644 {} +
find "$root" -type d -exec chmod 755 {} +

install -d "$root/DEBIAN"
cat >"$root/DEBIAN/control" <<CONTROL
Package: attache
Version: $(release/version.sh)
Architecture: amd64
Maintainer: $MAINTAINER
Section: net
Priority: optional
Installed-Size: $(du -sk --exclude=DEBIAN --apparent-size "$root" | cut -f1)
Depends: libc6 (>= $(release/glibc.sh "$program" "$library")), libgcc-s1
Recommends: ca-certificates
Description: Envoy endpoint picker for LLM inference
 Attaché runs beside Envoy and decides which model server answers each request.
 It predicts where a request costs the least time, from load, cached prefixes
 and the speed that it has learned of each server.
CONTROL
dpkg-deb --root-owner-group -Zxz --build "$root" "$output" >/dev/null
