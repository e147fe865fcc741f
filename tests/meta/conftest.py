"""Shapes that do not fit are refused by the library itself, not only by the checks of the tests."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked(monkeypatch):
    """As a user has it: annotations say nothing."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
