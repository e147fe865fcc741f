"""After the build: a link inside the site that leads to no file, or to no place on it, is a warning, hence an error."""

from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:  # the tests use this module where Sphinx is not installed
    from sphinx.application import Sphinx


class Page(HTMLParser):
    """The names of a page's places, and what it asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ids, links and images."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.places.add(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


def broken_links(site: Path) -> list[str]:
    """``page: link`` of every link that leads nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in ("#", ""):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            target = target / "index.html" if target.is_dir() else target
            there = target.exists()
            anchor = unquote(parts.fragment)
            known = pages[target].places if target in pages else {anchor}
            if not there or (anchor and anchor not in known and parts.path != "search.html"):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def check(app: "Sphinx", error: Exception | None) -> None:
    """Say what is broken."""
    from sphinx.util import logging

    logger = logging.getLogger(__name__)
    if error is None and app.builder.format == "html":
        for one in broken_links(Path(app.outdir).resolve()):
            logger.warning("a link that leads nowhere: %s", one)


def setup(app: "Sphinx") -> dict[str, bool]:
    """Listen; late, when everything is written."""
    app.connect("build-finished", check, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
