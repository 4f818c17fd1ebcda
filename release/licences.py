#!/usr/bin/env python3
"""Prints the licences of every crate that the program contains: the text of each, and the crates that have it.

    release/licences.py > THIRD-PARTY-LICENCES.txt
"""

import collections
import json
import pathlib
import subprocess
import sys

PATTERNS = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "UNLICENSE*", "license*", "licenses/*")


def packages():
    """The crates that are linked into the program, other than those of this repository."""
    command = ["cargo", "tree", "--locked", "--edges", "normal", "--target", "x86_64-unknown-linux-gnu", "--prefix", "none", "--format", "{p}"]
    tree = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    linked = {tuple(line.split()[:2]) for line in tree.splitlines() if line.strip()}
    metadata = subprocess.run(["cargo", "metadata", "--locked", "--format-version", "1"], check=True, capture_output=True, text=True).stdout
    for package in json.loads(metadata)["packages"]:
        if package["source"] and (package["name"], "v" + package["version"]) in linked:
            yield package


def main():
    texts, silent = collections.defaultdict(set), []
    for package in packages():
        name = f"{package['name']} {package['version']} ({package['license'] or package['license_file']})"
        folder = pathlib.Path(package["manifest_path"]).parent
        files = {file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()}
        if not files:
            silent.append(name)
        for file in files:
            texts[file.read_text(errors="replace").strip()].add(name)
    if not texts:
        sys.exit("licences: no crate has a licence file: are the sources of crates there (`cargo fetch`)?")
    print("Attaché contains these crates, under these licences.")
    for text, names in sorted(texts.items(), key=lambda item: (sorted(item[1]), item[0])):
        print("\n" + "=" * 100 + "\n" + "\n".join(sorted(names)) + "\n" + "-" * 100 + "\n" + text)
    if silent:
        print("\n" + "=" * 100 + "\nThese crates name a licence, and have no file with its text:\n" + "\n".join(sorted(silent)))


if __name__ == "__main__":
    main()
