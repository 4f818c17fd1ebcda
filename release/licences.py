#!/usr/bin/env python3
"""Prints the licences of every crate that the program and the library for Envoy contain: the text of each, and the crates
that have it.

    release/licences.py > THIRD-PARTY-LICENCES.txt
"""

import collections
import pathlib
import sys

from crates import linked

PATTERNS = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "UNLICENSE*", "license*", "licenses/*")


def main():
    texts, silent = collections.defaultdict(set), []
    for package in linked("attache", "attache-envoy-module"):
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
