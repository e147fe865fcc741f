import os
from collections.abc import Iterator

import jaxtyping
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For models this small, a second thread costs more than it gives; `variants.py` asks for more of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("LAYERWISE_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations unchecked: for the bulk of the cases."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(jaxtyping, "jaxtyped", lambda **options: lambda function: function)
