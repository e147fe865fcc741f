"""Operations that torch runs, by name: on a CPU they stand for a GPU's launches."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Those within a ``with``, in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))
