"""When to stop: the dictionary that predicts, or represents, other samples best."""

import math

from jaxtyping import Float
from torch import Tensor

from layerwise.selfsup.sparse_coding.losses import heldout_masked_loss, reconstruction_loss

RULES = ("masked", "reconstruction")


class Best:
    """The best dictionary so far, by a loss of samples that it is not trained on."""

    def __init__(
        self,
        Y: Float[Tensor, "n d"],
        k: int,
        hidden_fraction: float | int,
        patience: int,
        rule: str = "masked",
        *,
        normalize: bool = False,
    ) -> None:
        self.Y, self.k, self.hidden_fraction, self.patience, self.rule = Y, k, hidden_fraction, patience, rule
        self.normalize = normalize
        self.epoch, self.least = 0, math.inf
        self.dictionary: Tensor
        self.history: dict[str, list[float]] = {"epoch": [], "heldout_loss": []}

    def look(self, epoch: int, B: Float[Tensor, "d q"]) -> bool:
        """Compare a dictionary with the best; true once `patience` looks have not found a better one."""
        if self.rule == "masked":
            loss = float(heldout_masked_loss(self.Y, B, self.k, self.hidden_fraction, normalize=self.normalize))
        else:
            loss = float(reconstruction_loss(self.Y, B, self.k, normalize=self.normalize))
        self.history["epoch"].append(epoch)
        self.history["heldout_loss"].append(loss)
        if loss < self.least:
            self.least, self.epoch, self.dictionary = loss, epoch, B.clone()
        return stopped(self.history["heldout_loss"], self.patience) is not None


def stopped(losses: list[float], patience: int) -> int | None:
    """At which look a training ends whose losses are these: `patience` looks after its least one; None if not yet.

    >>> stopped([3.0, 2.0, 2.5, 2.4, 1.0], patience=2), stopped([3.0, 2.0, 2.5], patience=2)
    (3, None)
    """
    least = 0
    for look, loss in enumerate(losses):
        if loss < losses[least]:
            least = look
        if look - least >= patience:
            return look
    return None
