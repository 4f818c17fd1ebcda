#!/usr/bin/env bash
# What the scripts have in common that install the tools of the tests. Sourced by them.

# Waits until no other process installs into a directory, and keeps others waiting until the script ends.
#
#   lock DIRECTORY
lock() {
  mkdir -p "$(dirname "$1")"
  exec 9>"$1.lock"
  flock 9
}

# Ends the script unless Go is installed. Finds it too where Go's own instructions install it, for shells that read no profile.
must_have_go() {
  PATH=$PATH:/usr/local/go/bin
  command -v go >/dev/null || { echo "go is missing: install Go 1.25 (https://go.dev/doc/install)" >&2; exit 1; }
}

# Installs the packages that a file names from PyPI, unless they are there already. Where the script defines `unpack`, it is called with the directory, to
# make of the packages what is wanted of them. What else is given goes to pip.
#
#   install WHAT REQUIREMENTS DIRECTORY [ARGUMENTS…]
install() {
  local what=$1 requirements=$2 directory=$3
  shift 3
  lock "$directory"
  if cmp -s "$requirements" "$directory.installed"; then
    return
  fi
  echo "installing $what into $directory" >&2
  python3 -m pip --version >/dev/null 2>&1 || { echo "python3 has no pip: install it (Debian: apt-get install python3-pip)" >&2; exit 1; }
  rm -rf "$directory"
  mkdir -p "$directory"
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$directory" \
    --requirement "$requirements" "$@" >&2
  if declare -F unpack >/dev/null; then
    unpack "$directory" >&2
  fi
  cp "$requirements" "$directory.installed"
}

# Ends the script unless a program runs on this machine.
#
#   must_run BINARY ARGUMENTS…
must_run() {
  "$@" >/dev/null || { echo "$1 does not run on this machine ($(uname -sm))" >&2; exit 1; }
}
