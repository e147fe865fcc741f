"""MNIST: handwritten digits of 28 × 28 pixels."""

import os

from layerwise.data.images import Images
from layerwise.data.parquet import ImageTable
from layerwise.foundations.progress import Progress

MNIST = ImageTable(
    name="MNIST",
    repository="ylecun/mnist",
    places=("mnist", "mnist/mnist"),
    image="image",
    mode="L",
    checksums={
        "train": {
            "train-00000-of-00001.parquet": "43811fee3ed45c2f3f3c08ecf5a01b9074c1c5f7379df7a887b346efafdd427f",
        },
        "test": {
            "test-00000-of-00001.parquet": "0987906757acd8d023f0c3e607dbc3fbb691d844ff492b9a7677d8566a06a7cc",
        },
    },
)


def mnist(
    split: str = "train",
    *,
    folder: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    verify: bool = True,
    progress: bool | Progress | None = None,
) -> Images:
    """60,000 handwritten digits (or 10,000, "test"), ``[N, 1, 28, 28]`` between 0 and 1, with their labels.

    Reads ``mnist/<split>-*.parquet``, the layout of the Hugging Face hub. Needs the extra `data`.

    Args:
        split: "train" or "test".
        folder: holds `mnist/`; by default the one that the environment variable LAYERWISE_DATA names.
        limit: only the first so many.
        verify: compare the files with their recorded SHA-256; False for another version, such as the hub's own.
        progress: None shows a bar on a terminal only; True, always; False, never.

    Reference: LeCun, Bottou, Bengio and Haffner 1998.

    >>> try:
    ...     mnist(folder="no/such/folder")
    ... except FileNotFoundError as error:
    ...     print(error)
    Got no/such/folder, which is no folder. Expected a folder. Set LAYERWISE_DATA to one that exists, ...
    """
    return MNIST.read(split, folder, limit, verify, progress)
