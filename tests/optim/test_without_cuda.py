"""Members on a CPU need nothing of `layerwise.optim.cuda`: their tests pass where it cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TRAINING = """
import cuda_blocked
cuda_blocked.block()
import copy, sys
import torch
from optim_tools import MEMBERS, batches, cross_entropy, flat, member, mlp, train_step
try:
    import layerwise.optim.cuda
except ModuleNotFoundError:
    print("blocked")
for name in MEMBERS:
    model = mlp()
    start, opt = flat(model), member(name, model)
    for batch in batches(4, 5):
        train_step(model, opt, batch, cross_entropy)
    other = copy.deepcopy(model)
    again = member(name, other)
    again.load_state_dict(opt.state_dict())
    for trained, its in ((model, opt), (other, again)):
        train_step(trained, its, batches(5, 5)[4], cross_entropy)
    repr(opt), opt.health()
    assert not torch.equal(flat(model), start) and bool(flat(model).isfinite().all()), name
    torch.testing.assert_close(flat(other), flat(model))
    print("trained", name)
assert not any(name.startswith("layerwise.optim.cuda") for name in sys.modules)
"""
FORMULAS = sorted(HERE.glob("test_*formulas.py"))
WORDS = ("optim.cuda", '"products"', "host_may_sync", "cuda_blocked")
"""Of tests that ask for the GPU's part: refinement by products, or steps as on a GPU."""
OTHERS = sorted(
    path for path in {*HERE.glob("test_*.py")} - {*FORMULAS} if not any(word in path.read_text() for word in WORDS)
)
"""All other tests of this folder, which are about members and the engine."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, with the modules of these tests and the library that they see."""
    paths = [str(HERE), str(HERE.parent), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_member_trains_and_is_saved():
    from optim_tools import MEMBERS

    done = run("-c", TRAINING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["blocked", *(f"trained {name}" for name in MEMBERS)]


def run_tests(files: list[Path], marks: str) -> None:
    options = ("-q", "-p", "cuda_blocked", "-p", "no:cacheprovider", "-m", marks)
    done = run("-m", "pytest", *options, *map(str, files))
    assert done.returncode == 0, done.stdout + done.stderr


def test_formulas_of_a_member():
    run_tests([HERE / "test_foof_formulas.py"], "not slow and not gpu")


@pytest.mark.slow
def test_formulas_of_all_members():
    assert len(FORMULAS) >= 7
    run_tests(FORMULAS, "not gpu")


@pytest.mark.slow
def test_what_else_is_said_of_members():
    assert len(OTHERS) >= 10
    run_tests(OTHERS, "not slow and not gpu")


def test_what_needs_it_is_noticed(tmp_path: Path):
    """A file that imports it fails there, so that these tests can."""
    file = tmp_path / "test_of_the_gpu.py"
    file.write_text("def test_it():\n    import layerwise.optim.cuda.backend\n")
    done = run("-m", "pytest", "-q", "-p", "cuda_blocked", "-p", "no:cacheprovider", str(file))
    assert done.returncode == 1
    assert "layerwise.optim.cuda is blocked" in done.stdout
