"""Flowcharts of the documents, written in Mermaid so that GitHub draws them, as inline SVG: no script and no network.

Of Mermaid's language what the documents use: nodes ``id["name: words"]``, arrows ``-->`` and ``-.->``, and subgraphs,
each of which becomes a node of its chart and a chart of its own below it.
"""

import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests use this module where Sphinx is not installed
    from docutils import nodes
    from sphinx.application import Sphinx

NODE = r'(\w+)(?:\["([^"]*)"\])?'
EDGE = re.compile(rf"^{NODE}\s*(-->|-\.->)\s*(?:\|[^|]*\|\s*)?{NODE}$")
SUBGRAPH = re.compile(r'^subgraph (\w+)\["([^"]*)"\]$')
LINE, LETTER, PAD, GAP, STEP = 15, 6.4, 9, 18, 46
"""Pixels: height of a line, width of a letter, inside a box, between boxes, between rows."""


@dataclass
class Chart:
    """Nodes with their words, and arrows."""

    labels: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str, bool]] = field(default_factory=list)
    inside: dict[str, "Chart"] = field(default_factory=dict)

    def node(self, name: str, label: str | None) -> None:
        """A node by its name; its words may come at any of its mentions."""
        if label or name not in self.labels:
            self.labels[name] = label or self.labels.get(name, name)


def parse(text: str) -> Chart:
    """A chart from its source.

    >>> chart = parse('flowchart TD\\n a["A: one"] --> b\\n subgraph s["S"]\\n  c --> d\\n end\\n b -.-> s')
    >>> sorted(chart.labels), chart.edges, chart.inside["s"].edges
    (['a', 'b', 's'], [('a', 'b', True), ('b', 's', False)], [('c', 'd', True)])
    """
    whole = chart = Chart()
    for line in (line.strip() for line in text.splitlines()[1:]):
        if found := SUBGRAPH.match(line):
            whole.node(*found.groups())
            chart = whole.inside[found.group(1)] = Chart()
        elif line == "end":
            chart = whole
        elif found := EDGE.match(line):
            start, words, arrow, end, others = found.groups()
            chart.node(start, words)
            chart.node(end, others)
            chart.edges.append((start, end, arrow == "-->"))
        elif line:
            raise ValueError(f"a line that a flowchart of the documents does not have: {line!r}")
    return whole


def rows(chart: Chart) -> list[list[str]]:
    """Nodes by the longest way from above, each row ordered by the middle of what points to it."""
    before = defaultdict(list)
    for start, end, _ in chart.edges:
        before[end].append(start)

    def rank(name: str) -> int:
        return 1 + max((rank(one) for one in before[name]), default=-1)

    found: dict[int, list[str]] = defaultdict(list)
    for name in chart.labels:
        found[rank(name)].append(name)
    place: dict[str, float] = {}
    for level in sorted(found):
        found[level].sort(key=lambda name: sum(place[one] for one in before[name]) / max(len(before[name]), 1))
        place |= {name: (k + 1) / (len(found[level]) + 1) for k, name in enumerate(found[level])}
    return [found[level] for level in sorted(found)]


def words(label: str) -> list[str]:
    """Lines of a box: a name, and what it is."""
    lines = []
    for part in label.split("<br>"):
        name, colon, rest = part.partition(": ")
        lines += [name, *(textwrap.wrap(rest, 26) if colon else [])]
    return lines


def svg(chart: Chart, title: str) -> str:
    """Boxes in rows, arrows behind them."""
    boxes, top, levels = {}, PAD, rows(chart)
    sizes = {name: _size(words(label)) for name, label in chart.labels.items()}
    width = max(sum(sizes[name][0] + GAP for name in level) for level in levels)
    for level in levels:
        left = (width - sum(sizes[name][0] + GAP for name in level)) / 2 + GAP / 2
        for name in level:
            boxes[name] = (left, top, *sizes[name])
            left += sizes[name][0] + GAP
        top += max(sizes[name][1] for name in level) + STEP
    drawn = [_arrow(boxes[start], boxes[end], solid) for start, end, solid in chart.edges]
    drawn += [_box(words(chart.labels[name]), *box) for name, box in boxes.items()]
    return (
        f'<svg class="flowchart" viewBox="0 0 {width:.0f} {top - STEP + PAD:.0f}" role="img" '
        f'aria-label="{escape(title)}" style="max-width:{width:.0f}px">{"".join(drawn)}</svg>'
    )


def _size(lines: list[str]) -> tuple[float, float]:
    return max(len(line) for line in lines) * LETTER + 2 * PAD, len(lines) * LINE + 2 * PAD - 3


def _box(lines: list[str], left: float, top: float, width: float, height: float) -> str:
    text = "".join(
        f'<text x="{left + width / 2:.1f}" y="{top + PAD + LINE * (k + 0.65):.1f}"{" class=name" if k == 0 else ""}>'
        f"{escape(line)}</text>"
        for k, line in enumerate(lines)
    )
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5"/>{text}'


def _arrow(start: tuple[float, ...], end: tuple[float, ...], solid: bool) -> str:
    x, y = start[0] + start[2] / 2, start[1] + start[3]
    u, v = end[0] + end[2] / 2, end[1] - 5
    bend = (v - y) / 2
    dashes = "" if solid else ' stroke-dasharray="4 3"'
    way = f"M{x:.1f} {y:.1f}C{x:.1f} {y + bend:.1f} {u:.1f} {v - bend:.1f} {u:.1f} {v:.1f}"
    return (
        f'<path class="edge" d="{way}"{dashes}/>'
        f'<path class="head" d="M{u - 4:.1f} {v - 2:.1f}L{u:.1f} {v + 5:.1f}L{u + 4:.1f} {v - 2:.1f}Z"/>'
    )


def draw(app: "Sphinx", doctree: "nodes.document") -> None:
    """In place of the source, the chart and those inside it."""
    from docutils import nodes

    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            chart = parse(block.astext())
            pictures = [svg(chart, "what imports what")]
            for name, part in chart.inside.items():
                pictures.append(f"<p><em>Inside {escape(name)}:</em></p>{svg(part, f'inside {name}')}")
            block.replace_self(nodes.raw("", f'<div class="flowcharts">{"".join(pictures)}</div>', format="html"))


def setup(app: "Sphinx") -> dict[str, bool]:
    """Listen."""
    from pygments.lexers.special import TextLexer

    app.add_lexer("mermaid", TextLexer)
    app.connect("doctree-read", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
