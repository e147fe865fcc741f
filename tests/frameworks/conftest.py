"""Frameworks that train models: `make test-frameworks` has a venv with all of them. Absent ones are skipped."""

import os
from pathlib import Path

import jaxtyping
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is to be asked of the network

IGNORED = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::PendingDeprecationWarning",
    "ignore:mkldnn_matmul failed",  # bfloat16 on processors without it
)
"""What frameworks and torch say to their developers. Warnings of this library, `UserWarning`, stay errors."""


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations unchecked, as users have them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(jaxtyping, "jaxtyped", lambda **options: lambda function: function)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))
