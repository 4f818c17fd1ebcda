#!/usr/bin/env bash
# Moves the fragments of release/changes into CHANGELOG.md, below a heading for the version of Cargo.toml.
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
sections = {}
for path in fragments:
    heading, entries = None, []
    for line in path.read_text().splitlines():
        if line.startswith("### "):
            heading = line
        elif heading is None and line.strip():
            sys.exit(f"{path} begins with {line!r}; a heading such as `### Routing` is needed")
        elif line.strip():
            sections.setdefault(heading, []).append(line)
text = "".join(f"{heading}\n\n" + "\n".join(lines) + "\n\n" for heading, lines in sections.items())
if flag:
    print(text, end="")
    sys.exit()
log = pathlib.Path("CHANGELOG.md")
before, mark, after = log.read_text().partition("\n## ")
title = f"{version}\n\n"
if after.startswith(title):
    after = after.removeprefix(title)
    mark_and_rest = mark + title + text + after
else:
    mark_and_rest = mark + title + text + "## " + after
log.write_text(before + mark_and_rest)
for path in fragments:
    path.unlink()
print(f"{len(fragments)} fragments are in CHANGELOG.md, below {version}", file=sys.stderr)
PYTHON
