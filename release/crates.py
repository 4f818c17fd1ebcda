"""The crates that are linked into what a release has. Used by licences.py and sbom.py."""

import json
import subprocess


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def linked(*names):
    """The crates of `cargo metadata` that the packages with these names link, other than those of this repository."""
    wanted = [argument for name in names for argument in ("--package", name)]
    tree = output_of(
        "cargo", "tree", "--locked", "--edges", "normal", "--target", "x86_64-unknown-linux-gnu", "--prefix", "none", "--format", "{p}", *wanted
    )
    found = {tuple(line.split()[:2]) for line in tree.splitlines() if line.strip()}
    for package in json.loads(output_of("cargo", "metadata", "--locked", "--format-version", "1"))["packages"]:
        if package["source"] and (package["name"], "v" + package["version"]) in found:
            yield package
