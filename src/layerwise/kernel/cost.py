"""Counting what each order of contraction costs, before anything is computed."""

from dataclasses import dataclass

from layerwise.kernel.contraction import ORDERS

TRAFFIC = {"cpu": 8.0, "cuda": 32.0}
"""Multiply-adds that take as long as writing and reading one number, by device."""

HALVES, FEW = 4, 32
"""A square kernel is cut into at least this many rows of tiles, unless examples are few."""


@dataclass(frozen=True)
class Sizes:
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
    order: str, sizes: Sizes, n: int, m: int, pairs: int | float, scratch: int, traffic: float, keep_rows: bool
) -> Cost:
    """What an order costs for `pairs` pairs of n and m examples, with `scratch` numbers of room."""
    S, K, O, I, V = sizes.positions, sizes.groups, sizes.outputs, sizes.inputs, sizes.vectors
    # A square kernel in few tiles would compute most of both halves.
    largest = max(n, m) if pairs == n * m or n < FEW else -(-n // HALVES)
    tile, vectors = _tile(order, sizes, scratch, largest)
    row = K * O * min(sizes.tokens, 2 * tile * S) if sizes.tokens else sizes.row
    making = 0.0 if sizes.bare else float(V * S * row)  # the rows of one example
    if order == "gram":
        each = K * S * S * (I + V * V * (O + traffic / 2))
    elif order == "chain":
        each = K * (S * S * (I + V * O + traffic / 2) + S * V * O * (V + traffic))
    elif order == "product":
        each = K * S * V * O * (row / (K * O) + V + traffic) + making / tile
    else:
        each = float(V * V * row) + (0.0 if keep_rows else 2 * making / tile)
    total = pairs * each + ((n + m if pairs == n * m else n) * making if keep_rows else 0.0)
    kept = V * sizes.row if keep_rows else sizes.raw
    return Cost(total, kept, 0 if keep_rows else tile, vectors, _numbers(order, sizes, tile, vectors))


def _tile(order: str, sizes: Sizes, scratch: int, n: int) -> tuple[int, int]:
    """The most examples whose contraction fits in the scratch, and how many cotangents at a time."""
    vectors = sizes.vectors
    while True:
        for tile in _fewer(n):
            if _numbers(order, sizes, tile, vectors) <= scratch:
                return tile, vectors
        if vectors == 1:
            return 1, 1
        vectors = (vectors + 1) // 2


def _fewer(n: int) -> list[int]:
    """n, and ever smaller even parts of it."""
    return (
        sorted({-(-n // parts) for parts in range(1, n + 1)}, reverse=True) if n < 4096 else [4096, 1024, 256, 64, 8, 1]
    )


def _numbers(order: str, sizes: Sizes, b: int, V: int) -> int:
    """Scratch of a tile of b × b examples, with V of the cotangents on each side."""
    S, K, O, I = sizes.positions, sizes.groups, sizes.outputs, sizes.inputs
    standard = 2 * b * S * K * (I + V * O)
    row = K * O * min(sizes.tokens, 2 * b * S) if sizes.tokens else sizes.row
    if order == "gram":
        return standard + b * b * K * S * S * (1 + V * V) + b * b * V * V
    if order == "chain":
        return standard + b * b * K * S * (2 * S + 2 * V * O)
    if order == "product":
        return standard + b * V * row + 2 * b * b * K * S * V * O
    return standard + 2 * b * V * row
