#!/usr/bin/env python3
"""Writes the wheel of the library for Envoy. Called by build.sh.

    release/module_wheel.py LIBRARY TEXTS OUTPUT_DIRECTORY      TEXTS has THIRD-PARTY-LICENCES.txt

pip puts the library into `lib/attache` of the environment, where `attache envoy-module` finds it. It is a wheel of its own,
because one with the program and the library would be larger than 20 MB. Equal inputs give equal bytes; SOURCE_DATE_EPOCH
is the time of all files.
"""

import base64
import hashlib
import os
import pathlib
import subprocess
import sys
import time
import zipfile

SUMMARY = "Attaché inside Envoy: the library libattache_envoy.so, a dynamic module"
ROOT = pathlib.Path(__file__).resolve().parent.parent


def output_of(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout.strip()


def record(files, path):
    """The text of RECORD: path, hash and size of each file; its own line has only the path."""
    rows = []
    for name, (content, _) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join(rows) + f"{path},,\n"


def main():
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    library, texts, directory = (pathlib.Path(argument) for argument in sys.argv[1:])
    version = output_of(ROOT / "release/version.sh")
    tag = "py3-none-manylinux_" + output_of(ROOT / "release/glibc.sh", library).replace(".", "_") + "_x86_64"
    stem = f"attache_envoy-{version}"
    info = f"{stem}.dist-info"
    metadata = (
        f"Metadata-Version: 2.4\nName: attache-envoy\nVersion: {version}\nSummary: {SUMMARY}\n"
        "License-Expression: Apache-2.0\nLicense-File: LICENSE\nLicense-File: THIRD-PARTY-LICENCES.txt\n"
        f"Requires-Dist: attache=={version}\n"
    )
    wheel = f"Wheel-Version: 1.0\nGenerator: release/module_wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = {
        f"{stem}.data/data/lib/attache/{library.name}": (library.read_bytes(), 0o755),
        f"{info}/licenses/LICENSE": ((ROOT / "LICENSE").read_bytes(), 0o644),
        f"{info}/licenses/THIRD-PARTY-LICENCES.txt": ((texts / "THIRD-PARTY-LICENCES.txt").read_bytes(), 0o644),
        f"{info}/METADATA": (metadata.encode(), 0o644),
        f"{info}/WHEEL": (wheel.encode(), 0o644),
    }
    path = f"{info}/RECORD"
    files[path] = (record(files, path).encode(), 0o644)
    moment = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))[:6]
    with zipfile.ZipFile(directory / f"{stem}-{tag}.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (content, mode) in files.items():
            entry = zipfile.ZipInfo(name, moment)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, content, compresslevel=9)


if __name__ == "__main__":
    main()
