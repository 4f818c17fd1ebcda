#!/usr/bin/env bash
# CPU seconds after a change of one line, for this tree and for COMMIT in turn, and their ratio:
#   scorer   a line of a scorer, and the unit tests of scorers
#   check    a line of the picker, and `cargo check`
#   release  a line of a scorer, and a release binary; only with --release, since its first builds take minutes
# Usage: benches/edit.sh [--release] [--rounds N] COMMIT. Run it alone on the machine. Builds lie in target/edit.
set -euo pipefail
rounds=3
measures=(scorer check)
while [ $# -gt 1 ]; do
  case $1 in
    --release) measures+=(release) ;;
    --rounds) rounds=$2; shift ;;
    *) echo "unknown argument $1" >&2; exit 2 ;;
  esac
  shift
done
cd "$(dirname "$0")/.."
commit=$(git rev-parse --verify "${1:?usage: benches/edit.sh [--release] [--rounds N] COMMIT}^{commit}")
edit=$PWD/target/edit

# Copies, so that neither tree of the user is changed. Files keep their times, so that a second run builds little.
mkdir -p "$edit"
unpack() {
  rm -rf "$edit/$1/tree"
  mkdir -p "$edit/$1/tree"
  tar -x -C "$edit/$1/tree"
}
git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | unpack this
git archive "$commit" | unpack base

# The package whose folder holds a file.
package() {
  local folder
  folder=$(dirname "$1")
  until [ -f "$folder/Cargo.toml" ]; do folder=$(dirname "$folder"); done
  sed -n 's/^name = "\(.*\)"/\1/p' "$folder/Cargo.toml" | head -1
}

# Changes one line of a function: the first line of the first one called $2.
change() {
  sed -i '/bench_edit/d' "$1"
  sed -i "0,/fn $2[(<].*{\$/s//&\n        let _bench_edit = std::hint::black_box($RANDOM);/" "$1"
  grep -q bench_edit "$1" || { echo "no function $2 in $1" >&2; exit 1; }
}

# Runs a step of a measure in a tree; with `timed`, after the change.
step() {
  local which=$1 measure=$2 scorer picker
  cd "$edit/$which/tree"
  export CARGO_TARGET_DIR=$edit/$which/target
  scorer=$(find src -path '*/scorer/queue.rs')
  picker=$(find src \( -path 'src/picker/decide.rs' -o -path 'src/ext_proc/decide.rs' \) | head -1)
  if [ "${3:-}" = timed ]; then
    case $measure in
      check) change "$picker" '[a-z_]*' ;;
      *) change "$scorer" score ;;
    esac
  fi
  case $measure in
    scorer) cargo test --locked -q -p "$(package "$scorer")" --lib scorer:: ;;
    check) cargo check --locked -q ;;
    release) cargo build --locked -q --release --bin attache ;;
  esac
}

# CPU seconds, of the user and of the system, of a step and its processes.
seconds() {
  local TIMEFORMAT='%U %S' log=$edit/$1.log
  { time { (step "$1" "$2" timed) >"$log" 2>&1; }; } 2>&1 | awk '{ printf "%.1f", $1 + $2 }'
  [ "${PIPESTATUS[0]}" = 0 ] || { cat "$log" >&2; exit 1; }
}

median() { sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'; }

printf '%-8s %10s %10s %8s   CPU seconds, median of %s; base is %s\n' change this base ratio "$rounds" "${commit:0:10}"
for measure in "${measures[@]}"; do
  for which in this base; do (step "$which" "$measure" >/dev/null); done
  : >"$edit/this.txt"
  : >"$edit/base.txt"
  for _ in $(seq "$rounds"); do
    for which in this base; do echo "$(seconds "$which" "$measure")" >>"$edit/$which.txt"; done
  done
  this=$(median <"$edit/this.txt")
  base=$(median <"$edit/base.txt")
  printf '%-8s %10s %10s %7s %%\n' "$measure" "$this" "$base" "$(awk "BEGIN { printf \"%.0f\", 100 * $this / $base }")"
done
