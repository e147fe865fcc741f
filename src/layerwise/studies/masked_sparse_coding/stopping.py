"""Rules that end a training without knowing the truth, applied to what was seen along it."""

from layerwise.selfsup.sparse_coding.stopping import stopped
from layerwise.studies.masked_sparse_coding.comparison import Curves


def kept(curves: Curves, rule: str, patience: int) -> tuple[int, int]:
    """Which look's dictionary a rule keeps, and at which look it ends the training.

    Args:
        curves: of a training to its last epoch.
        rule: "masked" or "reconstruction", the held-out loss that is followed; "last" ends at the last epoch.
        patience: looks without a lower loss.

    >>> kept(Curves(masked=[3.0, 2.0, 4.0, 5.0, 1.0]), "masked", patience=2)
    (1, 3)
    """
    if rule == "last":
        return len(curves.epoch) - 1, len(curves.epoch) - 1
    losses = getattr(curves, rule)
    end = stopped(losses, patience)
    end = len(losses) - 1 if end is None else end
    return min(range(end + 1), key=losses.__getitem__), end
