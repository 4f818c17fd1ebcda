#!/usr/bin/env bash
# Makes the files of a release in dist/ (or $DIST), from a clean clone.
#
#   release/build.sh [--tested PROFILE] [PART...]
#
#   --tested PROFILE   packages the program of `cargo test` (profile `release` or `dev`), so that nothing is compiled
#
# It always makes the stripped program, the stripped library for Envoy, and their texts: completions, manual pages, licences of dependencies.
# Parts, all unless some are named:
#   archive    attache-VERSION-x86_64-linux-gnu.tar.gz: program, library, texts, Envoy bootstraps, example configurations
#   wheel      attache-VERSION-py3-none-….whl, made by maturin, with an SBOM (CycloneDX)
#   module     attache_envoy-VERSION-py3-none-….whl: the library
#   deb        attache_VERSION_amd64.deb, with a systemd unit
#   image      attache-VERSION-image.tar, an OCI image
#   charts     both Helm charts
#   sbom       attache-VERSION.cdx.json, the SBOM of the wheel, with the library
#   sums       SHA256SUMS
#   sign       SHA256SUMS.asc, if RELEASE_KEY names a key of gpg
#
# Needs Rust, Python 3 with pip, and helm, which it installs like the tests. Files have the time of the commit.
set -euo pipefail
cd "$(dirname "$0")/.."
. release/names.env
. tests/install-tools.sh

all=(archive wheel module deb image charts sbom sums sign)
tested=
parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --tested) tested=${2:?--tested needs a profile}; shift 2 ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *)
      case " ${all[*]} " in
        *" $1 "*) parts+=("$1"); shift ;;
        *) echo "release: no part is called $1; there are ${all[*]}" >&2; exit 64 ;;
      esac
      ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")

version=$(release/version.sh)
target=${CARGO_TARGET_DIR:-$PWD/target}
tools=${ATTACHE_TOOLS:-$target/tools}
dist=${DIST:-$PWD/dist}
mkdir -p "$dist"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The time of every file: that of the commit. Cargo must not see it, or it compiles C code again.
moment=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
unset SOURCE_DATE_EPOCH
export LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
name=attache-$version-x86_64-linux-gnu

if [ "$tested" ]; then
  # With the features that the tests add to dependencies, and the default features of all crates, cargo finds every crate compiled.
  features=tokio/test-util
  for crate in flow picker pool quota scheduling telemetry; do features+=,attache-$crate/testing; done
  for crate in $(grep -l '^default = ' src/*/Cargo.toml | cut -d/ -f2 | tr _ -); do features+=,attache-$crate/default; done
  build=(--profile "$tested" --features "$features")
  # Of the library: its tests make it panic.
  faults=(--features attache-envoy-module/faults)
  # The program of the tests stays as it is: theirs run meanwhile.
  export CARGO_BUILD_BUILD_DIR=$target CARGO_TARGET_DIR=$work/target
  built=$work/target/${tested/dev/debug}
else
  build=(--profile dist)
  faults=()
  built=$target/dist
  # The compiler writes paths of sources into the program; these do not depend on the directory.
  export RUSTFLAGS="--remap-path-prefix=$PWD=/attache --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
  # What `attache version --json` says.
  ATTACHE_COMMIT=$(git rev-parse HEAD)
  export ATTACHE_COMMIT ATTACHE_PROFILE=dist
fi

# tar and gzip without times, owners and the order of a directory.
pack() { # DIRECTORY OUTPUT
  tar --sort=name --mtime="@$moment" --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX,go-w \
    -C "$(dirname "$1")" -cf - "$(basename "$1")" | gzip -n9 >"$2"
}

# The program, and the library that links the same crates.
compile() {
  cargo build --locked --package attache --package attache-envoy-module --bin attache --lib "${build[@]}" "${faults[@]}"
}

# That the tests have compiled every crate with the features of this build: else CI compiles nearly everything twice.
compile_nothing() {
  compile 2>"$work/cargo.log" || { cat "$work/cargo.log" >&2; exit 1; }
  ! grep -q '^ *Compiling ' "$work/cargo.log" || {
    grep '^ *Compiling ' "$work/cargo.log" >&2
    echo "release: the tests have not compiled these crates, or with other features (a dev-dependency can add one), or their sources changed" >&2
    exit 1
  }
}

make_binaries() {
  if [ "$tested" ]; then compile_nothing; else compile; fi
  # maturin links the program again.
  case " ${parts[*]} " in *" wheel "*) make_wheel ;; esac
  strip -o "$work/attache" "$built/attache"
  strip -o "$work/libattache_envoy.so" "$built/libattache_envoy.so"
  chmod 755 "$work/attache" "$work/libattache_envoy.so"
}

make_texts() {
  mkdir -p "$work/texts/completions" "$work/texts/man"
  "$work/attache" completions bash >"$work/texts/completions/attache.bash"
  "$work/attache" completions zsh >"$work/texts/completions/_attache"
  "$work/attache" completions fish >"$work/texts/completions/attache.fish"
  "$work/attache" man "$work/texts/man"
  release/licences.py >"$work/texts/THIRD-PARTY-LICENCES.txt"
  cp "$work/texts/THIRD-PARTY-LICENCES.txt" "$dist"
}

make_archive() {
  mkdir -p "$work/$name"
  cp -r "$work/attache" "$work/libattache_envoy.so" "$work/texts"/* LICENSE README.md CHANGELOG.md envoy examples/configs "$work/$name"
  pack "$work/$name" "$dist/$name.tar.gz"
}

make_wheel() {
  install maturin release/requirements.txt "$tools/maturin"
  rm -f "$dist"/attache-*.whl
  # maturin calls cargo by this variable, and by its name for the metadata.
  mkdir -p "$work/bin"
  ln -sf "$PWD/release/cargo-for-maturin.sh" "$work/bin/cargo"
  REAL_CARGO=$(command -v cargo) SOURCE_DATE_EPOCH=$moment CARGO=$work/bin/cargo PATH=$work/bin:$PATH "$tools/maturin/bin/maturin" build \
    "${build[@]}" --bindings bin --locked --strip --auditwheel check --compression-level 9 --out "$dist"
}

make_module() {
  rm -f "$dist"/attache_envoy-*.whl
  SOURCE_DATE_EPOCH=$moment release/module_wheel.py "$work/libattache_envoy.so" "$work/texts" "$dist"
}

make_deb() {
  SOURCE_DATE_EPOCH=$moment release/deb.sh "$work/attache" "$work/libattache_envoy.so" "$work/texts" "$dist/attache_${version}_amd64.deb"
}

make_image() {
  SOURCE_DATE_EPOCH=$moment release/image.py "$work/attache" "$work/libattache_envoy.so" "$dist/attache-$version-image.tar" "$REGISTRY/attache:$version"
}

make_charts() {
  tests/install-kubernetes-tools.sh "$tools" >/dev/null
  local chart
  for chart in examples/kubernetes/helm/*/; do
    chart=$(basename "$chart")
    rm -rf "$work/charts"
    mkdir -p "$work/charts/unpacked"
    "$tools/kubernetes/helm" package --destination "$work/charts" "examples/kubernetes/helm/$chart" >/dev/null
    # helm writes the current time into the archive.
    tar -C "$work/charts/unpacked" -xzf "$work/charts/$chart-$version.tgz"
    pack "$work/charts/unpacked/$chart" "$dist/$chart-$version.tgz"
  done
}

make_sbom() {
  release/sbom.py "$dist"/attache-*.whl "$work/libattache_envoy.so" >"$work/sbom.json"
  mv "$work/sbom.json" "$dist/attache-$version.cdx.json"
}

make_sums() {
  (cd "$dist" && rm -f SHA256SUMS SHA256SUMS.asc && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
}

make_sign() {
  if [ -n "${RELEASE_KEY:-}" ]; then
    gpg --batch --yes --local-user "$RELEASE_KEY" --armor --detach-sign --output "$dist/SHA256SUMS.asc" "$dist/SHA256SUMS"
  else
    echo "release: not signed, because RELEASE_KEY is not set" >&2
  fi
}

started=$SECONDS
make_binaries
make_texts
for part in "${all[@]}"; do
  [ "$part" != wheel ] || continue
  case " ${parts[*]} " in *" $part "*) ;; *) continue ;; esac
  echo "release: $part (after $((SECONDS - started)) s)" >&2
  "make_$part"
done
ls -l "$dist" >&2
