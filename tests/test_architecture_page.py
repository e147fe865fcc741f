"""docs/architecture.md: its examples run, its names exist, its walks are what a trace sees, its levels those of CI."""

import ast
import importlib.util
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

import layerwise as lw
from layerwise.cli.main import main
from layerwise.curvature.approximation import Approximation
from layerwise.layers.form import RULES
from layerwise.optim.backend import Backend
from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.reference import Reference

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "layerwise"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"`([\w/]+\.py)(?:: ([\w.]+))?`")
STEP = re.compile(r"^(\d+)\. `([\w/]+\.py): ([\w.]+)`", re.MULTILINE)


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def section(title: str) -> str:
    """From a title, or the beginning of a line, to the next title."""
    _, _, after = text().partition(title)
    assert after, title
    return re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page's examples leave, run from top to bottom; what they register is taken out again."""
    module = types.ModuleType("architecture_page")
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.chdir(tmp_path_factory.mktemp("page"))
        patch.setitem(sys.modules, module.__name__, module)
        torch.manual_seed(0)
        for block in BLOCK.finditer(text()):
            line = text().count("\n", 0, block.start(1))
            exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), vars(module))
        yield module
    del RULES._entries[module.Fourier], Approximation.known[module.Scalar.name]


# --- examples --------------------------------------------------------------------------------------------------


def test_examples_run(page):
    assert page.verdict.n == 3
    assert page.losses[-1] < page.losses[0]
    assert "P^-1 (outgrads, 8) ∇L" in repr(page.opt)


def test_examples_are_short():
    lengths = [len([line for line in block.splitlines() if line.strip()]) for block in BLOCK.findall(text())]
    assert max(lengths) <= 40, lengths


def test_the_structure_is_the_mean_of_the_diagonal(page):
    diagonal = lw.fisher(page.model, page.data, structure="diag", estimator="exact")
    scalar = lw.fisher(page.model, page.data, structure="scalar", estimator="exact")
    for spec in diagonal.table.layers:
        exact, found = (F.operators[spec.name].diagonal() for F in (diagonal, scalar))
        torch.testing.assert_close(found, exact.mean().expand_as(exact))


def test_the_layer_has_factors(page):
    features = torch.cat([page.data[0].cos(), page.data[0].sin()], -1)
    fisher = lw.fisher(page.model, page.data, structure="kfac", estimator="exact")
    torch.testing.assert_close(fisher.operators["0"].A.values[0], features.mT @ features / len(features))


@pytest.mark.parametrize(("solver", "backend"), [("auto", Reference), ("products", CudaBackend)])
def test_the_member_is_its_formula_on_both_backends(page, solver: str, backend: type[Backend]):
    torch.manual_seed(1)
    x, y = torch.randn(32, 3, dtype=torch.float64), torch.randint(2, (32,))
    layer = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
    options = {"damping": 0.5, "momentum": 0.0, "scale": "formula", "estimator": "empirical", "solver": solver}
    opt = page.LeftKFAC(layer, lr=1.0, **options)
    f = layer(x)
    f.retain_grad()
    torch.nn.functional.cross_entropy(f, y).backward()
    g = f.grad * len(x)
    P = g.mT @ g / len(x)
    wanted = layer.weight - torch.linalg.solve(P + 0.5 * P.trace() / 2 * torch.eye(2), layer.weight.grad)
    opt.step()
    assert isinstance(opt._stacks[0].backend, backend)
    torch.testing.assert_close(layer.weight, wanted)


def test_the_member_goes_on_from_a_checkpoint(page):
    def trained(steps: int, state=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        opt = page.LeftKFAC(model, lr=1e-2, likelihood="categorical")
        if state is not None:
            model.load_state_dict(state[0])
            opt.load_state_dict(state[1])
        for _ in range(steps):
            opt.zero_grad()
            torch.nn.functional.cross_entropy(model(page.data[0]), page.data[1]).backward()
            opt.step()
        return model.state_dict(), opt.state_dict()

    whole, resumed = trained(4)[0], trained(2, trained(2))[0]
    torch.testing.assert_close(resumed["weight"], whole["weight"])


# --- names and walks -------------------------------------------------------------------------------------------


def defined(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a file, as ``Class.method``."""
    found = set[str]()

    def visit(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(before + node.name)
                visit(node.body, f"{before}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update(before + target.id for target in node.targets if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def test_every_place_exists():
    places = PLACE.findall(text())
    assert len(places) > 100
    for file, name in places:
        path = next((path for path in (SOURCE / file, ROOT / file) if path.exists()), None)
        assert path is not None, file
        assert not name or name in defined(path), f"{file}: {name}"
    for folder in re.findall(r"`([\w/]+/)`", text()):
        assert (SOURCE / folder).is_dir(), folder


def walk(title: str) -> list[tuple[str, str]]:
    """Files and functions of a numbered list."""
    steps = STEP.findall(section(title))
    numbers = [int(number) for number, _, _ in steps]
    assert len(numbers) > 6
    assert numbers == list(range(1, len(numbers) + 1))
    return [(file, name) for _, file, name in steps]


def in_order(steps: list[tuple[str, str]], traced: dict[tuple[str, str], int]) -> None:
    """Each step is called, first calls in the order of the page."""
    places = list(traced)
    missing = [step for step in steps if step not in traced]
    assert not missing
    found = [places.index(step) for step in steps]
    assert found == sorted(found), [steps[k] for k in range(1, len(found)) if found[k] < found[k - 1]]


@pytest.fixture(scope="module")
def step_trace():
    spec = importlib.util.spec_from_file_location("step_trace", ROOT / "benchmarks" / "step_trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "step_trace", module)
        spec.loader.exec_module(module)
        yield module


def test_the_walk_through_fisher(step_trace):
    in_order(walk("### Through `lw.fisher"), step_trace.fisher().functions)


def test_the_walk_through_forward_and_backward(step_trace):
    _, _, after = section("### Through `loss.backward()`").partition("During forward and backward")
    part = after.partition("In `opt.step()`")[0]
    in_order([(file, name) for _, file, name in STEP.findall(part)], step_trace.step("KFAC", whole=True)().functions)


def test_the_walk_through_a_step(step_trace):
    in_order(walk("In `opt.step()`, on a CPU."), step_trace.step("KFAC", whole=False)().functions)


def test_the_walk_through_run(page, step_trace, tmp_path, capsys):
    pytest.importorskip("tyro")
    with step_trace.Trace() as trace:
        assert main(["run", f"{page.__name__}:EXPERIMENT", "--preset", "smoke", "--out", str(tmp_path)]) == 0
    assert "1 of 1 as expected" in capsys.readouterr().out
    in_order(walk("### Through `layerwise run"), trace.functions)


# --- levels ----------------------------------------------------------------------------------------------------


def test_the_levels_are_those_of_the_import_contract():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    wanted = [sorted(re.findall(r"layerwise\.(\w+)", level)) for level in contract["layers"]]
    table = section("| level, each imports those below it | what it is |")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    assert [sorted(re.findall(r"`(\w+)`", row)) for row in rows] == wanted


def imported(path: Path) -> set[str]:
    """Packages that a file imports, also inside functions; not those that only type checkers see."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    modules = set[str]()
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "layerwise":
            modules |= {f"layerwise.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {module.split(".")[1] for module in modules if module.startswith("layerwise.")}


def test_the_arrows_are_imports_and_all_imports_follow_from_them():
    levels = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    actual = {a: set[str]().union(*map(imported, (SOURCE / a).rglob("*.py"))) & levels - {a} for a in levels}
    picture = text().partition("```mermaid")[2].partition("```")[0]
    drawn = {
        pair for pair in re.findall(r"^    (\w+)(?:\[.*?\])? --> (\w+)", picture, re.MULTILINE) if {*pair} <= levels
    }
    assert {a for a, _ in drawn} | {b for _, b in drawn} == levels
    assert [(a, b) for a, b in sorted(drawn) if b not in actual[a]] == []
    reached = {a: {b for first, b in drawn if first == a} for a in levels}
    for _ in levels:
        reached = {a: below.union(*(reached[b] for b in below)) for a, below in reached.items()}
    assert {a: below - reached[a] for a, below in actual.items() if below - reached[a]} == {}
