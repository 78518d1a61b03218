"""Hooks of mkdocs: pages of the repository's root are pages of the site, too.

Links are written for readers of the repository. On the site, those between pages are changed, and
those to other files become text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
#: Pages of the root, and their names on the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, page in PAGES.items():
        text = _LINK.sub(lambda link: _rewritten(link, ""), (ROOT / name).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page in docs/."""
    if page.file.src_uri in PAGES.values():
        return markdown
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda link: _rewritten(link, folder), markdown)


def _rewritten(link: re.Match[str], folder: str) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(folder, target))
    if path in PAGES:
        to_root = "../" * folder.removeprefix("docs").count("/")
        return f"[{text}]({to_root}{PAGES[path]}{anchor})"
    if path.startswith("docs/"):
        return link[0] if folder else f"[{text}]({path.removeprefix('docs/')}{anchor})"
    return text
