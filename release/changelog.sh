#!/usr/bin/env bash
# Moves the fragments of release/changes into CHANGELOG.md, below the version of Cargo.toml and the headings that they have.
#
#   release/changelog.sh            moves them
#   release/changelog.sh --print    prints what it would add
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 - "$(release/version.sh)" "${1:-}" <<'PYTHON'
import pathlib, sys

version, flag = sys.argv[1:]
if flag not in ("", "--print"):
    sys.exit("usage: release/changelog.sh [--print]")
fragments = sorted(path for path in pathlib.Path("release/changes").glob("*.md") if path.name != "README.md")


def render(sections):
    return "".join(f"{heading}\n\n" + "\n".join(lines) + "\n\n" for heading, lines in sections.items())


sections = {}
for path in fragments:
    heading = None
    for line in path.read_text().splitlines():
        if line.startswith("### "):
            heading = line
        elif heading is None and line.strip():
            sys.exit(f"{path} begins with {line!r}; a heading such as `### Routing` is needed")
        elif line.strip():
            sections.setdefault(heading, []).append(line)
if flag:
    print(render(sections), end="")
    sys.exit()
log = pathlib.Path("CHANGELOG.md")
head, *releases = log.read_text().split("\n## ")
if not releases or releases[0].splitlines()[0] != version:
    releases.insert(0, f"{version}\n")
# The entries of a heading that the release has already go below it.
intro, *parts = releases[0].split("\n### ")
merged = {}
for part in parts:
    heading, _, entries = part.partition("\n")
    merged["### " + heading] = entries.strip("\n").splitlines()
for heading, lines in sections.items():
    merged.setdefault(heading, []).extend(lines)
releases[0] = (intro.rstrip("\n") + "\n\n" + render(merged)).rstrip("\n") + "\n"
log.write_text("\n## ".join([head, *releases]))
for path in fragments:
    path.unlink()
print(f"{len(fragments)} fragments are in CHANGELOG.md, below {version}", file=sys.stderr)
PYTHON
