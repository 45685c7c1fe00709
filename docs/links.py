"""A hook of mkdocs: README.md becomes the home page, and files outside docs/ that a page links to become part of the
site, so that mkdocs checks these links as well."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
"""The target of a Markdown link to a file: not of a URL, and without the part after `#`."""
PAGES = {"README.md": "index.md"}
"""Names of files in the site that differ from those in the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README.md, and the files outside docs/ that the pages link to, from page to page."""
    known = {page_path(Path(file.abs_src_path)) for file in files.documentation_pages() if file.abs_src_path}
    unread = ["README.md", *known]
    while unread:
        path = unread.pop()
        if path not in known:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
            known.add(path)
        if path.endswith(".md"):
            linked = (target_of(path, link) for _, link in LINK.findall((ROOT / path).read_text()))
            unread += [name for name in linked if name not in known and (ROOT / name).is_file() and is_outside(name)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page for the site, in which docs/ is the root."""
    path = page_path(Path(str(page.file.abs_src_path)))
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        return match[1] + posixpath.relpath(site_path(target_of(path, match[2])), folder or ".")

    return LINK.sub(rewritten, markdown)


def page_path(path: Path) -> str:
    """The path of a page relative to the repository."""
    return path.relative_to(ROOT).as_posix()


def target_of(page: str, link: str) -> str:
    """The file that a link of a page names, relative to the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def is_outside(path: str) -> bool:
    return not path.startswith("docs/")


def site_path(path: str) -> str:
    """The path of a file in the site."""
    return PAGES.get(path, path.removeprefix("docs/"))
