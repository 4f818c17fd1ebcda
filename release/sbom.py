#!/usr/bin/env python3
"""Prints the bill of materials of a release: that in the wheel of the program, with the library for Envoy as a component.

    release/sbom.py WHEEL LIBRARY > attache-VERSION.cdx.json

The library links crates of the program and no others: else this fails.
"""

import hashlib
import json
import pathlib
import sys
import zipfile

from crates import linked


def of_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if ".dist-info/sboms/" in name and name.endswith(".json"))
        return json.loads(archive.read(name))


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    bill, library = of_wheel(sys.argv[1]), pathlib.Path(sys.argv[2])
    refs = {(part["name"], part["version"]): part["bom-ref"] for part in bill["components"]}
    crates = [(package["name"], package["version"]) for package in linked("attache-envoy-module")]
    if missing := sorted(crate for crate in crates if crate not in refs):
        sys.exit(f"sbom: the library links crates that the program lacks: {missing}")
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    bill["components"].append({
        "type": "library", "bom-ref": library.name, "name": library.name, "version": bill["metadata"]["component"]["version"],
        "hashes": [{"alg": "SHA-256", "content": digest}], "licenses": [{"expression": "Apache-2.0"}],
    })
    bill.setdefault("dependencies", []).append({"ref": library.name, "dependsOn": sorted(refs[crate] for crate in crates)})
    print(json.dumps(bill, indent=2, sort_keys=True))


if __name__ == "__main__":
    main()
