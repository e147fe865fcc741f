"""All claims at a glance: a row an experiment, a small square a claim, its shape and colour the outcome."""

from collections.abc import Sequence
from html import escape

from layerwise.report.views import ClaimRow

SIDE, STEP, A_LINE = 9, 11, 18
"""A square, the way to the next one, and how many stand in one line."""


def squares(rows: Sequence[ClaimRow], a_line: int = A_LINE, tips: bool = True) -> str:
    """The claims of a run as a drawing; with `tips`, a square says what it stands for where one points at it.

    >>> squares([])
    ''
    """
    if not rows:
        return ""
    lines = -(-len(rows) // a_line)
    width, height = STEP * min(len(rows), a_line), STEP * lines
    parts = [
        f'<use class="{row.outcome}" href="#is-{row.outcome}" x="{STEP * (k % a_line)}" y="{STEP * (k // a_line)}"'
        + (f">{_tip(row)}</use>" if tips else "/>")
        for k, row in enumerate(rows)
    ]
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg class="squares" {size} aria-hidden="true">{"".join(parts)}</svg>'


def _tip(row: ClaimRow) -> str:
    return f"<title>{escape(row.verdict, quote=False)}: {escape(row.statement, quote=False)}</title>"


SHAPES = {
    "held": '<rect width="9" height="9" rx="1.5"/>',
    "known": '<rect width="9" height="9" rx="1.5"/><path class="cut" d="M2.2 2.2l4.6 4.6M6.8 2.2l-4.6 4.6"/>',
    "misprint": '<rect width="9" height="9" rx="1.5"/><path class="cut" d="M1.8 7.2l5.4-5.4"/>',
    "failed": '<path class="thick" d="M1 1l7 7M8 1l-7 7"/>',
    "surprise": '<path class="thick" d="M4.5 .5v5M4.5 7.2v1.6"/>',
    "error": '<path class="thick" d="M1 4.5h7"/>',
    "few": '<rect class="open" x=".75" y=".75" width="7.5" height="7.5" rx="1.5"/><path class="ring" d="M4.5 3v3"/>',
    "not-run": '<rect class="open" x=".75" y=".75" width="7.5" height="7.5" rx="1.5"/>',
}
"""One shape an outcome, so that colour is never the only difference; a page has each once and refers to it."""
