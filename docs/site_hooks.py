"""Hooks of mkdocs: pages outside of docs/ are pages of the site, too.

Links are written for readers of the repository. On the site, those between pages are changed, and
those to other files become text.
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
#: Pages outside of docs/, and their names on the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "tests/promises.md": "promises.md",
    "benchmarks/results/accuracy.md": "accuracy.md",
    "benchmarks/results/comparison.md": "compared.md",
    "benchmarks/results/overhead.md": "overhead.md",
    "benchmarks/results/try.md": "tried.md",
    "benchmarks/results/versions.md": "versions.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/."""
    for name, page in PAGES.items():
        text = _LINK.sub(partial(_rewritten, name, page), (ROOT / name).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page in docs/."""
    name = page.file.src_uri
    if name in PAGES.values():
        return markdown
    return _LINK.sub(partial(_rewritten, f"docs/{name}", name), markdown)


def _rewritten(name: str, page: str, link: re.Match[str]) -> str:
    """The link, in a file that is a page of the site, as on the site."""
    text, target, anchor = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if path not in PAGES and not path.startswith("docs/"):
        return text
    to = posixpath.relpath(PAGES.get(path, path.removeprefix("docs/")), posixpath.dirname(page))
    return f"[{text}]({to}{anchor})"
