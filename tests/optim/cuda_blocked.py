"""A plugin for pytest, ``-p cuda_blocked``: `layerwise.optim.cuda` cannot be imported, as if it had been deleted."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

BLOCKED = "layerwise.optim.cuda"


class Blocked(MetaPathFinder):
    """Finds nothing, and says so, for one package and all that is in it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise for what is blocked; other finders are asked for the rest."""
        if fullname == BLOCKED or fullname.startswith(BLOCKED + "."):
            raise ModuleNotFoundError(f"{fullname} is blocked", name=fullname)


def pytest_configure() -> None:
    """Before any test imports the library."""
    block()


def block() -> None:
    """From now on; nothing of it may have been imported yet."""
    assert not any(name.startswith(BLOCKED) for name in sys.modules)
    sys.meta_path.insert(0, Blocked())
