#!/usr/bin/env bash
# Installs Attaché by the commands of the README, word for word, in clean environments without a compiler:
#
#   Python        the wheel and Envoy in a virtual environment, then `attache quickstart`; all of it in at most 60 s
#   Debian        the package in a minimal Debian, by apt-get
#   other Linux   the archive
#
#   tests/readme.sh DIST     DIST has the files of a release
#
# Needs the minimal Debian of tests/install-debian.sh in $ATTACHE_TOOLS, and root for it.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$(realpath "${1:?usage: tests/readme.sh DIST}")
tools=${ATTACHE_TOOLS:-$PWD/target/tools}
limit=60
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The commands in the row of the README's table that begins with this word.
commands() {
  local row
  row=$(grep "^| $1" README.md) || { echo "readme.sh: README.md has no row '$1'" >&2; exit 1; }
  grep -o '`[^`]*`' <<<"$row" | tr -d '`'
}

# Runs a command with this PATH and nothing else of this shell, in a directory that has the files in dist/.
clean() { # DIRECTORY PATH COMMAND
  env -i HOME="$work/home" TMPDIR=/tmp PATH="$2" bash -euc "cd '$1' && $3"
}

mkdir -p "$work/home" "$work/python" "$work/linux"
ln -s "$dist" "$work/python/dist"
ln -s "$dist" "$work/linux/dist"

python3 -m venv "$work/environment"
path=$work/environment/bin:/usr/bin:/bin
if PATH=$path command -v cargo rustc; then echo "readme.sh: there is a compiler" >&2; exit 1; fi
mapfile -t steps < <(commands Python)
[ "${#steps[@]}" = 2 ] || { echo "readme.sh: the row 'Python' has ${#steps[@]} commands, not 2" >&2; exit 1; }
begin=$SECONDS
clean "$work/python" "$path" "${steps[0]}"
installed=$((SECONDS - begin))
clean "$work/python" "$path" "${steps[1]}" >"$work/quickstart.log" || { cat "$work/quickstart.log" >&2; exit 1; }
took=$((SECONDS - begin))
grep -q 'every request got a response' "$work/quickstart.log" || { cat "$work/quickstart.log" >&2; exit 1; }
echo "Python: $(clean / "$path" 'attache version') installed in $installed s, the whole demonstration shown after $took s"
[ "$took" -le "$limit" ] || { echo "readme.sh: more than $limit s" >&2; exit 1; }

cp -a "$tools/debian" "$work/debian"
mkdir "$work/debian/dist"
cp "$dist"/attache_*.deb "$work/debian/dist"
# The package recommends certificates of public authorities, which would come from a mirror.
echo 'APT::Install-Recommends "false";' >"$work/debian/etc/apt/apt.conf.d/no-mirror"
mapfile -t steps < <(commands Debian)
chroot "$work/debian" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin bash -euc "cd / && ${steps[0]}" >"$work/apt.log" 2>&1 </dev/null ||
  { cat "$work/apt.log" >&2; exit 1; }
echo "Debian: $(chroot "$work/debian" /usr/bin/attache version)"

mapfile -t steps < <(commands 'any other Linux')
clean "$work/linux" /usr/bin:/bin "${steps[0]}"
echo "any other Linux: $("$work"/linux/attache-*/attache version)"
