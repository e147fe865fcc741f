"""What marks of tests stand for, in every folder; and these tests' own modules in this one, such as `interpreter`."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import annotations
from chromium import chromium
from interpreter import marks
from rounding import VARIABLE, OtherOrder
from thinning import left_out
from waiting import nothing_waits

annotations.install()

CUBLAS = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
"""torch warns at the first product of a thread, for which it then makes a CUDA context. Backward passes have threads of
their own, so that whichever test comes first would fail."""
PROFILER = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
"""The same at the first profile."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: of Triton's kernels, on a CPU; run with `make test-interpreted`")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    everywhere = [CUBLAS, PROFILER] if torch.cuda.is_available() else []
    for item in items:
        for mark in [*everywhere, *(marks() if item.get_closest_marker("interpreted") else [])]:
            item.add_marker(mark)
    for item in list(left_out(items)):
        item.add_marker(pytest.mark.slow)


ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run `make test-gpu` on one"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    """For a test that is the same on both: a CPU always, a GPU with those that need one."""
    return request.param


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Whatever waits for the GPU is an error."""
    torch.cuda.synchronize()
    with nothing_waits():
        yield


@pytest.fixture(autouse=True)
def the_same_draws() -> None:
    """What a test draws must not depend on those that its process ran before, which `pytest -n` chooses."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def another_rounding() -> Iterator[None]:
    """Where it is asked for, every test runs as on another machine: see `rounding`."""
    seed = os.environ.get(VARIABLE)
    if not seed:
        yield
        return
    with OtherOrder(int(seed)):
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium that reaches this machine alone; one for all tests, since Playwright allows no second."""
    with chromium() as opened:
        yield opened
