"""Counting what each order of contraction costs, before anything is computed."""

from dataclasses import dataclass
from functools import lru_cache

from layerwise.kernel.contraction import ORDERS

TRAFFIC = {"cpu": 8.0, "cuda": 32.0}
"""Multiply-adds that take as long as writing and reading one number, by device."""

START = {"cpu": 0.0, "cuda": 4e9}
"""Multiply-adds that take as long as starting the operations of one more tile, by device."""

HALVES, FEW = 4, 32
"""A square kernel is cut into up to this many rows of tiles, to compute little more than one half of it, unless
examples are few."""


@dataclass(frozen=True)
class LayerSizes:
    """One layer in standard form, for one example."""

    positions: int
    """S."""
    groups: int
    """K."""
    outputs: int
    """O."""
    inputs: int
    """I; 1 where inputs are one-hot, since comparing two indices is one operation."""
    vectors: int
    """V, functions of the model's output."""
    raw: int
    """Numbers that the recorded input and output gradients have."""
    tokens: int = 0
    """Size of the vocabulary where inputs are one-hot, else 0."""
    sparse: bool = False
    """Positions are those at which the functions' gradients are not zero, and at least half are."""
    bare: bool = False
    """No rule: per-example gradients are all there is."""
    taps: int = 1
    """How many times larger the unfolded input is."""

    @property
    def row(self) -> int:
        """Entries of one per-example gradient."""
        return self.groups * self.outputs * (self.tokens or self.inputs)

    def orders(self) -> list[str]:
        """What can be done with this layer."""
        return ["rows"] if self.bare else list(ORDERS)


@dataclass(frozen=True)
class Cost:
    """Counts for one layer and all pairs of examples."""

    multiply_adds: float
    kept: int
    """Numbers kept an example."""
    tile: int
    """Examples contracted at a time; 0: per-example gradients of all at once."""
    vector_tile: int
    """Cotangents contracted at a time."""
    scratch: int
    """Numbers that one tile takes."""


def cost(
    order: str,
    sizes: LayerSizes,
    n: int,
    m: int,
    pairs: int | float,
    scratch: int,
    traffic: float,
    keep_rows: bool,
    start: float = 0.0,
) -> Cost:
    """What an order costs for `pairs` pairs of n and m examples, with `scratch` numbers of room.

    `traffic` and `start` are what a number written and read, and a tile, cost beside their multiply-adds.
    """
    all_pairs = pairs == n * m
    parts = 1 if all_pairs or n < FEW else _rows_of_tiles(n * n * _each(order, sizes, n, traffic, keep_rows), start)
    tile, vectors = _tile(order, sizes, scratch, max(n, m) if all_pairs else -(-n // parts))
    making = 0.0 if sizes.bare else float(sizes.vectors * sizes.positions * _row(sizes, tile))  # of one example
    total = pairs * _each(order, sizes, tile, traffic, keep_rows)
    total += (n + m if all_pairs else n) * making if keep_rows else 0.0
    kept = sizes.vectors * sizes.row if keep_rows else sizes.raw
    return Cost(total, kept, 0 if keep_rows else tile, vectors, _numbers(order, sizes, tile, vectors))


def _each(order: str, sizes: LayerSizes, tile: int, traffic: float, keep_rows: bool) -> float:
    """For one pair of examples, in tiles of so many."""
    S, K, O, I, V = sizes.positions, sizes.groups, sizes.outputs, sizes.inputs, sizes.vectors
    row = _row(sizes, tile)
    making = 0.0 if sizes.bare else float(V * S * row)
    if order == "gram":
        return K * S * S * (I + V * V * (O + traffic / 2))
    if order == "chain":
        return K * (S * S * (I + V * O + traffic / 2) + S * V * O * (V + traffic))
    if order == "product":
        return K * S * V * O * (row / (K * O) + V + traffic) + making / tile
    return float(V * V * row) + (0.0 if keep_rows else 2 * making / tile)


def _row(sizes: LayerSizes, tile: int) -> int:
    """Entries of one per-example gradient, of the tokens that occur in two tiles."""
    return sizes.groups * sizes.outputs * min(sizes.tokens, 2 * tile * sizes.positions) if sizes.tokens else sizes.row


def _rows_of_tiles(work: float, start: float) -> int:
    """How many a square of so many multiply-adds is cut into: h of them compute (h + 1)/2h of it, in h (h + 1)/2 tiles.

    >>> _rows_of_tiles(1e9, start=0.0), _rows_of_tiles(1e9, start=4e9), _rows_of_tiles(1e12, start=4e9)
    (4, 1, 4)
    """
    return min(range(HALVES, 0, -1), key=lambda h: work * (h + 1) / (2 * h) + start * h * (h + 1) / 2)


def _tile(order: str, sizes: LayerSizes, scratch: int, n: int) -> tuple[int, int]:
    """The most examples whose contraction fits in the scratch, and how many cotangents at a time."""
    vectors = sizes.vectors
    while True:
        for tile in _fewer(n):
            if _numbers(order, sizes, tile, vectors) <= scratch:
                return tile, vectors
        if vectors == 1:
            return 1, 1
        vectors = (vectors + 1) // 2


@lru_cache(maxsize=64)
def _fewer(n: int) -> tuple[int, ...]:
    """n, and ever smaller even parts of it."""
    if n >= 4096:
        return 4096, 1024, 256, 64, 8, 1
    return tuple(sorted({-(-n // parts) for parts in range(1, n + 1)}, reverse=True))


def _numbers(order: str, sizes: LayerSizes, b: int, V: int) -> int:
    """Scratch of a tile of b × b examples, with V of the cotangents on each side."""
    S, K, O, I = sizes.positions, sizes.groups, sizes.outputs, sizes.inputs
    standard = 2 * b * S * K * (I + V * O)
    row = _row(sizes, b)
    if order == "gram":
        return standard + b * b * K * S * S * (1 + V * V) + b * b * V * V
    if order == "chain":
        return standard + b * b * K * S * (2 * S + 2 * V * O)
    if order == "product":
        return standard + b * V * row + 2 * b * b * K * S * V * O
    return standard + 2 * b * V * row
