"""Python blocks of the README, of CONTRIBUTING, of guides and of theory pages run, each document from top to bottom."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import layerwise as lw

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md", ROOT / "docs" / "choose.md"]
DOCUMENTS += [path for folder in ("guides", "theory") for path in sorted((ROOT / "docs" / folder).glob("[!i]*.md"))]
DOCUMENTS.remove(ROOT / "docs" / "guides" / "frameworks.md")  # each of its blocks needs a framework: tests/frameworks
MADE = [ROOT / "docs" / folder for folder in ("_build", "gallery", "experiments")]
"""Folders that the build of the site fills."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks
    names: dict = {"__name__": path.stem}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(path), "exec"), names)  # errors show the document's own lines


def test_the_readme_shows_ten_lines():
    block, *_ = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len([line for line in block.splitlines() if line.strip()]) == 10


@pytest.mark.parametrize(
    "path",
    [
        *ROOT.glob("*.md"),
        *(path for path in (ROOT / "docs").rglob("*.md") if not any(path.is_relative_to(made) for made in MADE)),
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(path):
    for target in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
        if "://" not in target:
            assert (path.parent / target).exists(), target


# --- what docs/decisions/0005 says of torch and of the library -------------------------------------------


class Twice(nn.Module):
    """One module under two names, and a parameter without a rule."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.b(self.a(x).tanh()) * self.scale


def test_functional_call_leaves_a_module_with_two_names_changed():
    """If this fails, torch has mended it, and the decision can be thought over."""
    model = Twice()
    weight = model.a.weight
    torch.func.functional_call(model, {k: p.detach().clone() for k, p in model.named_parameters()}, torch.ones(1, 2))
    assert model.a.weight is not weight


@pytest.mark.parametrize("structure", ["implicit", "kfac", "dense"])
def test_a_module_with_two_names_is_left_as_it_was(structure):
    model = Twice()
    before = dict(model.named_parameters())
    batch = torch.randn(5, 2), torch.randint(2, (5,))
    v = lw.ParamVector.randn(model, generator=0)
    assert float(lw.fisher(model, batch, structure=structure, estimator="exact").quad(v)) > 0
    assert torch.isfinite((lw.hessian(model, batch, likelihood="categorical") @ v).norm())
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert model.a is model.b
