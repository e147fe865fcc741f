"""What is built and shipped: one version, archives that install in an empty environment, a cheap import."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import layerwise as lw

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
USE = """
import torch
import layerwise as lw

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
x, y = torch.randn(32, 4), torch.randint(3, (32,))
opt = lw.optim.KFAC(model, lr=1e-2)
for _ in range(3):
    opt.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
print(lw.__version__, float(lw.fisher(model, (x, y)).trace()) > 0, lw.ntk(model, x).trace().item() > 0, lw.__file__)
"""


def test_the_version_is_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PROJECT["project"]
    source = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [lw.__version__]


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [lw.__version__]
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load(text)
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["license"] == PROJECT["project"]["license"]


def test_types_are_shipped():
    assert (ROOT / "src" / "layerwise" / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_all_is_what_a_user_may_want():
    extras = PROJECT["project"]["optional-dependencies"]
    (inside,) = re.findall(r"layerwise\[(.*)\]", extras["all"][0])
    named = set(inside.split(","))
    assert named <= extras.keys()
    assert extras.keys() - named == {"all", "dev", "docs", "zoo", "frameworks", "peers", "ray", "hub"}


def test_pins_are_of_what_is_asked_for():
    """Every package that an extra of `make` names has a version in constraints.txt."""
    pinned = {re.split(r"==", line)[0].lower().replace("_", "-") for line in _lines(ROOT / "constraints.txt")}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(one for name in ("dev", "docs") for one in extras[name])]
    names = {re.split(r"[\[<>=! ]", one)[0].lower() for one in wanted} - {"layerwise"}
    assert names <= pinned


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if "==" in line]


def _seconds(code: str) -> float:
    """The least of fresh interpreters, the first of which compiles; processor time: other work does not count."""
    times = "import time; begin = time.process_time(); {}; print(time.process_time() - begin)"
    run = [sys.executable, "-c", times.format(code)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return min(float(subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout) for _ in range(4))


@pytest.mark.slow
def test_the_import_costs_no_more_than_torch():
    """`import layerwise` alone brings no torch; with an optimizer, a matrix and a kernel it is 1.15 times torch's.

    The second bound leaves room for noise.
    """
    torch = _seconds("import torch")
    assert _seconds("import layerwise") < 0.2 * torch
    assert _seconds("import torch, layerwise; layerwise.optim.KFAC; layerwise.fisher; layerwise.ntk") < 1.3 * torch


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "layerwise", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"layerwise {lw.__version__}\n"


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A source archive, and the wheel that is built from it."""
    pytest.importorskip("build", reason="type: pip install build hatchling")
    pytest.importorskip("hatchling", reason="type: pip install build hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(archives):
    names = zipfile.ZipFile(archives[0]).namelist()
    assert all(name.startswith(("layerwise/", f"layerwise-{lw.__version__}.dist-info/")) for name in names)
    shipped = {name for name in names if name.startswith("layerwise/")}
    there = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "layerwise").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == there
    assert "layerwise/py.typed" in shipped
    assert any(name.endswith(".j2") for name in shipped)


@pytest.mark.slow
def test_the_source_archive_has_tests_and_documents_and_nothing_built(archives):
    with tarfile.open(archives[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/site/test_packages.py", "docs/index.md", "CITATION.cff", "LICENSE", "Makefile"} <= names
    assert not [name for name in names if name.startswith(("docs/_build", "docs/gallery", "docs/experiments", "runs"))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_installs_in_an_empty_environment(archives, kind, tmp_path):
    """Nothing of this checkout is on the path; the four dependencies come from the environment that runs the tests."""
    archive = archives[0 if kind == "wheel" else 1]
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    (place,) = {str(Path(path)) for path in sys.path if path.endswith("site-packages") and sys.prefix in path}
    folder = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    dependencies = PROJECT["project"]["dependencies"]
    assert len(dependencies) == 4
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", str(archive)]
    (Path(folder) / "dependencies.pth").write_text(place + "\n", encoding="utf-8")
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    clean = {"PATH": f"{tmp_path / 'empty' / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}
    for command in ([python, "-c", USE], [python.parent / "layerwise", "list"], [python, "-m", "layerwise", "--help"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=clean)
        assert done.returncode == 0, done.stderr
        if command[1:2] == ["-c"]:
            version, fisher, kernel, where = done.stdout.split()
            assert (version, fisher, kernel) == (lw.__version__, "True", "True")
            assert Path(where).is_relative_to(tmp_path)
