"""axe-core on a page: the rules of WCAG 2.2 A and AA and its good practice, as a list of what breaks them."""

from pathlib import Path
from typing import Any

import pytest

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
UNFOLD = "() => document.querySelectorAll('details').forEach(one => { one.open = true; })"


def violations(page: Any) -> list[str]:
    """Rules that a page breaks and the elements that do, with everything unfolded; skips where axe-core is absent.

    The page's context must bypass its Content-Security-Policy, which allows no script but its own.
    """
    package = pytest.importorskip("axe_playwright_python", reason="type: pip install axe-playwright-python")
    page.evaluate(UNFOLD)
    page.evaluate((Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("rules => axe.run(document, { runOnly: rules })", RULES)
    assert len(found["passes"]) > 20  # it has looked
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found["violations"] for node in rule["nodes"][:5]]
