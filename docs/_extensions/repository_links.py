"""Links that are right in the repository, made right on the site.

Documents link to one another by path, so that they can be read where they lie. Three of them are pages of the site
under another name, folders are their index, examples of the gallery are pages that the build makes, and source files
are no pages at all: there the link becomes its text.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests use this module where Sphinx is not installed
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
EXAMPLES = ROOT / "examples" / "gallery"
CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PAGES = {
    ROOT / "README.md": DOCS / "index.md",
    ROOT / "CHANGELOG.md": DOCS / "changelog.md",
    ROOT / "CONTRIBUTING.md": DOCS / "contributing.md",
    DOCS / "decisions": DOCS / "decisions" / "index.md",
}


def on_site(text: str, folder: Path, written_for: Path) -> str:
    """A document of `written_for`, with its links as a page of `folder` needs them."""

    def rewritten(found: re.Match[str]) -> str:
        words, target, anchor = found.group(1), found.group(2), found.group(3) or ""
        if "://" in target or target.startswith("mailto:"):
            return found.group(0)
        path = Path(os.path.normpath(written_for / target))
        path = PAGES.get(path, path)
        if path.parent == EXAMPLES:
            path = DOCS / "gallery" / f"{path.stem}.rst"
        if path.is_relative_to(DOCS):
            return f"[{words}]({Path(os.path.relpath(path, folder)).as_posix()}{anchor})"
        return words

    parts = CODE.split(text)  # what is between fences is left as it is
    return "".join(part if k % 2 else LINK.sub(rewritten, part) for k, part in enumerate(parts))


def read(app: "Sphinx", name: str, source: list[str]) -> None:
    """Before a page is parsed: documents of the root are taken in whole, and links put right."""
    page = DOCS / f"{name}.md"
    outside = {place: document for document, place in PAGES.items() if document.suffix == ".md"}
    if page in outside and not page.name.startswith("index"):
        document = outside[page]
        source[0] = on_site(document.read_text(encoding="utf-8"), page.parent, document.parent)
        app.env.note_dependency(document)
    elif page.suffix == ".md" and (DOCS / f"{name}.md").exists():
        source[0] = on_site(source[0], page.parent, page.parent)


def setup(app: "Sphinx") -> dict[str, bool]:
    """Listen."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
