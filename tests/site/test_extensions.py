"""What the build of the site adds to Sphinx: links put right, docstrings escaped, charts drawn, dead links seen."""

import doctest
import re
from pathlib import Path

import docstring_text
import flowchart
import link_check
import pytest
import repository_links

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("module", [docstring_text, flowchart])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


def test_dead_links_are_seen(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a><a href="b.html#no">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a.html">4</a><img src="none.png">')
    (tmp_path / "d.html").write_text('<a href="https://example.org/">5</a><a href="#">6</a><a href="data:,">7</a>')
    assert link_check.broken_links(tmp_path) == ["a.html: b.html#no", "a.html: c.html", "b.html: none.png"]


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[c](../../CONTRIBUTING.md#style)", "[c](../contributing.md#style)"),
        ("[d](../decisions/)", "[d](../decisions/index.md)"),
        ("[e](../../examples/gallery/plot_laplace.py)", "[e](../gallery/plot_laplace.rst)"),
        ("[f](../../src/layerwise/theory/)", "f"),
        ("[g](optimizers.md#damping)", "[g](optimizers.md#damping)"),
        ("[h](https://example.org/a.md)", "[h](https://example.org/a.md)"),
        ("![i](../figures/front_page.svg)", "![i](../figures/front_page.svg)"),
        ("```python\nmodel[0](x)\n```", "```python\nmodel[0](x)\n```"),
    ],
)
def test_links_of_a_guide(link, expected):
    assert repository_links.on_site(link, DOCS / "guides", DOCS / "guides") == expected


def test_links_of_a_document_of_the_root():
    text = "[a](docs/architecture.md) and [b](CHANGELOG.md)"
    assert repository_links.on_site(text, DOCS, DOCS.parent) == "[a](architecture.md) and [b](changelog.md)"


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("of *args and |x|_2", r"of \*args and \|x\|\_2"),
        ("``|x|`` and `a_b`", "``|x|`` and `a_b`"),
        (">>> f(*x)\n|y|", ">>> f(*x)\n|y|"),
        ("as follows::\n\n    a_ = |b|\n\nthen c_", "as follows::\n\n    a_ = |b|\n\nthen c\\_"),
    ],
)
def test_docstrings(docstring, expected):
    assert "\n".join(docstring_text.escaped(docstring.split("\n"))) == expected


def test_the_map_is_drawn():
    """Every box and every arrow of the chart on the map; arrows point down."""
    (source,) = re.findall(
        r"^```mermaid\n(.*?)^```", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.M | re.S
    )
    chart = flowchart.parse(source)
    assert {"cli", "optim", "foundations"} <= chart.labels.keys()
    drawn = flowchart.svg(chart, "the map")
    assert drawn.count("<rect") == len(chart.labels)
    assert drawn.count('class="edge"') == len(chart.edges) == source.count("->") - len(chart.inside["optim"].edges)
    level = {name: k for k, row in enumerate(flowchart.rows(chart)) for name in row}
    assert all(level[start] < level[end] for start, end, _ in chart.edges)


def test_a_chart_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match="does not have"):
        flowchart.parse("flowchart TD\n a ==> b")
