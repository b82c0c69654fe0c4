"""A MkDocs hook: pages of the site that are at the root of the repository, and links that lead out of docs/.

Links in documents are written for a code host. On the site, a link to another page leads there, and a link to a file
that is not a page is reduced to its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds `PAGES`."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=linked(text, ".")))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    if page.file.src_uri in PAGES.values():
        return markdown
    folder = os.path.dirname(f"docs/{page.file.src_uri}")
    return linked(markdown, folder, folder)


def linked(markdown: str, folder: str, shown_in: str = "docs") -> str:
    """Returns `markdown`, located in `folder` of the repository, with its links adjusted for its page in `shown_in`."""

    def one(match: re.Match) -> str:
        image, words, target, anchor = match.groups(default="")
        # a link text that is the document's file name
        words = words.removeprefix("docs/").removesuffix(".md") if words.endswith(".md") else words
        if re.match(r"\w+:", target):
            return match[0]
        path = os.path.normpath(os.path.join(folder, target))
        if path in PAGES:
            return f"[{words}]({os.path.relpath(f'docs/{PAGES[path]}', shown_in)}{anchor})"
        if path.startswith("docs/"):
            return f"{image}[{words}]({os.path.relpath(path, shown_in)}{anchor})"
        return words

    return LINK.sub(one, markdown)
