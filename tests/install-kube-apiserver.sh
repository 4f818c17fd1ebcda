#!/usr/bin/env bash
# Installs kube-apiserver, built from its Go module, etcd from the distribution's package, and CustomResourceDefinitions from Go modules into
# DIRECTORY/kube-apiserver unless they are there already. Needs Go 1.25, Python 3 and apt-get. Prints that directory.
#
#   tests/install-kube-apiserver.sh DIRECTORY
set -euo pipefail
. "$(dirname "$0")/install-tools.sh"
module=$(realpath "$(dirname "$0")")/kube-apiserver
directory=${1:?usage: install-kube-apiserver.sh DIRECTORY}/kube-apiserver
lock "$directory"
mkdir -p "$directory"
directory=$(realpath "$directory")
must_have_go

if [ ! -x "$directory/etcd" ]; then
  echo "installing etcd into $directory" >&2
  package=$(mktemp -d)
  trap 'rm -rf "$package"' EXIT
  # apt-get drops its rights to those of _apt for the download.
  chmod 755 "$package" && [ "$(id -u)" != 0 ] || chown _apt "$package"
  (cd "$package" && { apt-get download etcd-server || { apt-get update && apt-get download etcd-server; }; }) >&2
  dpkg-deb -x "$package"/etcd-server_*.deb "$package/files"
  mv "$package/files/usr/bin/etcd" "$directory/etcd"
fi

if ! cmp -s "$module/crds.txt" "$directory/crds/installed"; then
  echo "installing CustomResourceDefinitions into $directory/crds" >&2
  rm -rf "$directory/crds"
  mkdir "$directory/crds"
  grep -v '^#' "$module/crds.txt" | while read -r path version file name; do
    downloaded=$(go mod download -json "$path@$version" | python3 -c 'import json, sys; print(json.load(sys.stdin)["Dir"])')
    # One document of the file. Lines of helm are conditions around it.
    awk -v name="$name" 'BEGIN { RS = "\n---\n" } $0 ~ "\n  name: " name "(\n|$)"' "$downloaded/$file" | sed '/^{{/d' >"$directory/crds/$name.yaml"
    [ -s "$directory/crds/$name.yaml" ] || { echo "install-kube-apiserver.sh: $file of $path $version has no $name" >&2; exit 1; }
  done
  cp "$module/crds.txt" "$directory/crds/installed"
fi

if [ ! -x "$directory/kube-apiserver" ] || ! cmp -s "$module/go.mod" "$directory/installed"; then
  version=$(sed -n 's/^\tk8s.io\/kubernetes v//p' "$module/go.mod")
  echo "building kube-apiserver $version into $directory" >&2
  IFS=. read -r major minor _ <<<"$version"
  about=k8s.io/component-base/version
  # No optimisation, no inlining, no debug information, and garbage is collected only by memory-hungry steps: all of it saves CPU time of the build.
  (
    cd "$module"
    export GOFLAGS=-mod=readonly GOGC=off GOMEMLIMIT=2GiB
    go build -buildvcs=false -gcflags='all=-N -l -dwarf=false' \
      -ldflags "-s -w -X $about.gitVersion=v$version -X $about.gitMajor=$major -X $about.gitMinor=$minor -X $about.gitTreeState=clean" \
      -o "$directory/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
  ) >&2
  cp "$module/go.mod" "$directory/installed"
fi
echo "$directory"
