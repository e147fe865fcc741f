"""The manifest says which code ran."""

import shutil
import subprocess
from pathlib import Path

import layerwise
from layerwise.experiments import manifest as manifests


def fresh_version() -> dict:
    return manifests.code_version.__wrapped__()


def test_commit_of_the_checkout():
    root = Path(layerwise.__file__).parents[2]
    if shutil.which("git") is None or not (root / ".git").exists():
        assert fresh_version()["commit"] is None
        return
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert fresh_version()["commit"] == head.stdout.strip()
    assert fresh_version()["version"] == layerwise.__version__


def test_no_commit_of_a_repository_that_is_not_ours(tmp_path, monkeypatch):
    """An installed copy inside somebody's repository is not tracked by it."""
    package = tmp_path / "venv" / "layerwise"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(layerwise, "__file__", str(package / "__init__.py"))
    assert fresh_version() == {"version": layerwise.__version__, "commit": None, "changed": None}


def test_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert fresh_version()["commit"] is None
