"""The Python blocks of the README and of the guides run, each document from top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
    (block,) = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len([line for line in block.splitlines() if line.strip()]) == 10


@pytest.mark.parametrize(
    "path", [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(path):
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target
