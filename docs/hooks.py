"""Links from the documentation to other files of the repository, such as examples and tests.

In the repository these links are relative paths that leave `docs/`. The site has no such files, so each file that is linked becomes part of
the site under `repository/`, and the links are rewritten. Markdown files become pages. Links to directories become text.
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

# Weights of pages in the search: the page of symptoms comes first, pages about other products come last.
WEIGHTS = {"how-to/troubleshooting.md": 8, "coming-from/": 0.3}
ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()([^)#\s]*)")
# The whole of a link: its text and its target.
WHOLE = re.compile(r"\[([^][]*)\]\(([^)#\s]*)[^)\s]*\)")


def target(origin, link):
    """The path in the repository that `link` in the file `origin` names, or None for links elsewhere."""
    if not link or ":" in link or link.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def uri(path):
    """Where the site has the file."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def on_files(files, config):
    pending = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(pending)
    while pending:
        origin = pending.pop()
        for link in LINK.findall((ROOT / origin).read_text(encoding="utf-8")):
            path = target(origin, link)
            if path is None or path in known or path.startswith("docs/") or not (ROOT / path).is_file():
                continue
            known.add(path)
            files.append(File.generated(config, uri(path), abs_src_path=str(ROOT / path)))
            if path.endswith(".md"):
                pending.append(path)
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    for beginning, weight in WEIGHTS.items():
        if here.startswith(beginning):
            page.meta["search"] = {"boost": weight}
    origin = here.removeprefix("repository/") if here.startswith("repository/") else f"docs/{here}"

    def rewrite(match):
        path = target(origin, match.group(1))
        if path is None or (path.startswith("docs/") and origin.startswith("docs/")):
            return match.group(1)
        return posixpath.relpath(uri(path), posixpath.dirname(here) or ".")

    def text(match):
        path = target(origin, match.group(2))
        return match.group(1) if path and (ROOT / path).is_dir() else match.group(0)

    return LINK.sub(rewrite, WHOLE.sub(text, markdown))
