#!/usr/bin/env bash
# Installs Chromium into DIRECTORY/chromium unless it is there already. Prints the path of the program.
#
# That of the machine is taken where there is one. Else Debian's package chromium is unpacked and not installed, with the packages that it needs
# and that this machine lacks, and a font.
#
#   tests/install-chromium.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
tools=$(realpath -m "${1:?usage: install-chromium.sh DIRECTORY}")/chromium

# Starts the unpacked program with its libraries, fonts and settings.
wrapper() {
  cat <<SCRIPT
#!/bin/sh
root=$tools/root
export LD_LIBRARY_PATH=\$root/usr/lib/$1-linux-gnu:\$root/lib/$1-linux-gnu:\$root/usr/lib/$1-linux-gnu/pulseaudio
export FONTCONFIG_FILE=\$root/fonts.conf
exec "\$root/usr/lib/chromium/chromium" "\$@"
SCRIPT
}

# Where the fonts are, and which one is taken for names that no font has, such as that of the font for interfaces.
fonts() {
  cat <<XML
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>$tools/root/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>$tools/root/fonts-cache</cachedir>
  <match target="pattern"><edit name="family" mode="append_last"><string>DejaVu Sans</string></edit></match>
</fontconfig>
XML
}

if [ ! -x "$tools/chromium" ]; then
  rm -rf "$tools"
  mkdir -p "$tools"
  if command -v chromium >/dev/null; then
    ln -s "$(command -v chromium)" "$tools/chromium"
  else
    echo "installing Chromium into $tools" >&2
    command -v apt-get >/dev/null || { echo "install-chromium.sh: install chromium: apt-get is missing" >&2; exit 1; }
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # Where the package lists are absent or old, they are read first.
    fetch() {
      apt-get install --download-only --yes --no-install-recommends -o "Dir::Cache::archives=$work" -o APT::Sandbox::User=root \
        chromium fonts-dejavu-core >&2
    }
    mkdir -p "$work/partial"
    fetch || { apt-get update >&2 && fetch; }
    for package in "$work"/*.deb; do dpkg-deb -x "$package" "$tools/root"; done
    fonts >"$tools/root/fonts.conf"
    wrapper "$(uname -m)" >"$tools/chromium"
    chmod +x "$tools/chromium"
  fi
fi
must_run "$tools/chromium" --version
echo "$tools/chromium"
