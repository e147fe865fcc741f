"""The reference: every public name is on it, once, and has an example that runs."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import layerwise as lw

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVE = re.compile(r"^\.\. (?:auto(?:function|class|exception)|py:data):: ([\w.]+)$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGES = [
    "layerwise",
    "layerwise.optim",
    "layerwise.bounds",
    "layerwise.meta",
    "layerwise.regimes",
    "layerwise.selfsup",
    "layerwise.structure",
    "layerwise.theory",
    "layerwise.foundations.likelihoods",
    "layerwise.studies.feature_learning",
    "layerwise.testing",
    "layerwise.training",
    "layerwise.data",
    "layerwise.report",
]
REEXPORT = re.compile(r"^ *from [\w.]+ import (\w+) as \1$", re.MULTILINE)
FUNCTION = re.compile(r"^def ([a-z]\w*)", re.MULTILINE)


def public(package: str) -> set[str]:
    """What a package shows: the names that its ``__init__`` exports under themselves, modules left out."""
    module = importlib.import_module(package)
    text = Path(module.__file__).read_text(encoding="utf-8")
    names = {*REEXPORT.findall(text), *FUNCTION.findall(text)}
    return {name for name in names if not inspect.ismodule(getattr(module, name))}


def shown() -> dict[str, Path]:
    """Dotted names on the pages, and where."""
    return {name: path for path in PAGES for name in DIRECTIVE.findall(path.read_text(encoding="utf-8"))}


def found(dotted: str):
    package, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(package), name)


def test_what_the_package_shows_is_what_is_asked_for():
    """`public` reads source; what users see is `dir`."""
    names = {name for name in lw.__all__ if not inspect.ismodule(getattr(lw, name))}
    assert names == public("layerwise")
    assert {"KFAC", "Muon", "UpdateRule"} <= public("layerwise.optim")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_a_page(package):
    missing = {f"{package}.{name}" for name in public(package)} - shown().keys()
    assert not missing


def test_no_name_is_on_two_pages_or_twice():
    names = [name for path in PAGES for name in DIRECTIVE.findall(path.read_text(encoding="utf-8"))]
    assert len(names) == len(set(names))


def test_names_on_pages_exist_and_say_what_they_are():
    for dotted in shown():
        assert inspect.getdoc(found(dotted)), dotted


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example(package):
    """In its docstring, which `tests/test_doctests.py` runs, or in the code of its page, which the test below runs."""
    pages = shown()
    for name in sorted(public(package)):
        dotted = f"{package}.{name}"
        code = "\n".join(BLOCK.findall(pages[dotted].read_text(encoding="utf-8")))
        assert ">>>" in (found(dotted).__doc__ or "") or re.search(rf"\b{name}\b", code), dotted


@pytest.mark.parametrize(
    "path", [p for p in PAGES if "```python" in p.read_text(encoding="utf-8")], ids=lambda p: p.stem
)
def test_examples_of_pages_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, names = path.read_text(encoding="utf-8"), {"__name__": path.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(path), "exec"), names)
