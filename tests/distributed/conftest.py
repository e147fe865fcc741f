import jaxtyping
import pytest


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations unchecked, as in the processes that are compared."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(jaxtyping, "jaxtyped", lambda **options: lambda function: function)
