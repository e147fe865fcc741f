"""The oracle of these tests is the fuzzer's."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For models this small, a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations unchecked: other tests have run the same code with checks, which are most of a small model's time."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(jaxtyping, "jaxtyped", lambda **options: lambda function: function)
