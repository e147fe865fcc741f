"""The recipes of docs/guides/frameworks.md run, each by itself."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "frameworks.md"
RECIPE = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGES = ("transformers", "accelerate", "lightning", "torchtitan")
RECIPES = {found[1]: found for found in RECIPE.finditer(PAGE.read_text(encoding="utf-8"))}

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*dataloader' does not have many workers",
    "ignore:The number of training batches",
    "ignore:`isinstance.treespec, LeafSpec.`",
)


def test_there_is_one_for_each_framework():
    assert len(RECIPES) == len(PACKAGES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = RECIPES[name]
    code = recipe[2]
    for package in PACKAGES:
        if re.search(rf"^(?:from|import) {package}\b", code, re.MULTILINE):
            pytest.importorskip(package, reason=f"needs {package}: make test-frameworks")
    if "Trainer" in name:
        pytest.importorskip("accelerate", reason="needs accelerate: make test-frameworks")
    monkeypatch.chdir(tmp_path)
    line = PAGE.read_text(encoding="utf-8").count("\n", 0, recipe.start(2))
    names = {"__name__": "recipe"}
    exec(compile("\n" * line + code, str(PAGE), "exec"), names)  # errors show the page's own lines
