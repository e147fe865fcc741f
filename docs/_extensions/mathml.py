"""Formulas as MathML, which browsers draw themselves: no script, no font and no network.

MathJax and KaTeX would be loaded from a server, or shipped with the site; `latex2mathml` is plain Python.
"""

from typing import Any

from latex2mathml.converter import convert
from sphinx.application import Sphinx


def inline(self: Any, node: Any) -> None:
    """A formula within a line."""
    self.body.append(convert(node.astext(), display="inline"))
    raise nodes_skipped()


def block(self: Any, node: Any) -> None:
    """A formula by itself."""
    self.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise nodes_skipped()


def nodes_skipped() -> Exception:
    """What tells docutils that the node is written."""
    from docutils.nodes import SkipNode

    return SkipNode()


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    app.connect("config-inited", lambda _, config: setattr(config, "html_math_renderer", "mathml"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
