"""Public names of a package that are imported when they are first used.

``import layerwise`` alone takes no torch along, so that a command line which computes nothing answers at once. A
package lists its names once, as imports that only type checkers execute, and calls `import_when_used` below them:

    if TYPE_CHECKING:
        from layerwise.curvature.build import fisher as fisher

    import_when_used(__name__)
"""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package whose public names are imported at their first use, and whose submodules can be had by their name."""

    _origins: dict[str, tuple[str, str]]
    """From a public name to the module that has it, and to its name there."""

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there yet."""
        if name in self._origins:
            module, inside = self._origins[name]
            if module == self.__name__:  # a submodule
                return importlib.import_module(f"{module}.{inside}")
            holder = importlib.import_module(module)
            if not hasattr(holder, inside) and hasattr(holder, "__path__"):
                importlib.import_module(f"{module}.{inside}")  # a submodule of another package
            vars(self)[name] = found = getattr(holder, inside)
            return found
        if not name.startswith("_") and importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """As for every module, except that a submodule does not hide a public name that it shares.

        Importing ``layerwise.layers`` sets the attribute `layers` of ``layerwise``, which is a function for its users.
        """
        origin = ".".join(self._origins.get(name, ()))
        submodule = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if not (submodule and origin and origin != value.__name__):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """The public names, imported or not; submodules can be had by their name, and are not shown."""
        own = {name for name, value in vars(self).items() if not isinstance(value, ModuleType)}
        return sorted({*own, *self._origins} - {"TYPE_CHECKING", "import_when_used", "_origins"})


def import_when_used(package: str) -> None:
    """Make a package import the names of its ``if TYPE_CHECKING:`` block when they are used.

    >>> import layerwise
    >>> "fisher" in dir(layerwise)
    True
    """
    module = sys.modules[package]
    assert module.__file__ is not None, "a package with an __init__.py"
    source = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom) and node.module]
    origins = {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}
    vars(module)["_origins"], vars(module)["__all__"] = origins, sorted(origins)
    module.__class__ = LazyPackage
