"""Rows of Table C.8 of Wu (2023) whose arithmetic can be done again: a bound from KL, error and λ that are printed."""

from typing import NamedTuple

from layerwise import bounds

EXAMPLES = 60_000
DRAWS, DELTA_DRAWS = 50_000, 0.01


class Row(NamedTuple):
    """As printed."""

    bound: float
    kl: float
    error: float
    """"SNN loss"."""
    half_log_lambda: float
    """The column "λ (prior)"."""


BELOW_THE_CAP = {
    "T-600 BASE": Row(0.1540, 4612.6, 0.03373, -1.3313),
    "T-600 APPR": Row(0.1432, 3980.6, 0.03417, -1.6063),
    "T-600 ITER": Row(0.1198, 3766.1, 0.02347, -1.2913),
    "T-1200 ITER": Row(0.1417, 5071.0, 0.02292, -1.4763),
    "R-600 BASE": Row(0.6046, 1144.8, 0.507, -1.8263),
    "R-600 ITER.M": Row(0.5616, 340.62, 0.5065, -2.5263),
    "T-600, 10 classes, ITER": Row(0.2132, 8697.9, 0.02947, -1.3063),
    "T-600², 10 classes, ITER": Row(0.2431, 10568.0, 0.03057, -1.5713),
}
AT_THE_CAP = {
    "T-300² BASE": Row(0.1686, 5514.9, 0.03329, -1.1513),
    "T-200², 10 classes, BASE": Row(0.4165, 21896.0, 0.04706, -1.1513),
    "T-200², 10 classes, ITER": Row(0.2145, 9821.0, 0.02229, -1.1513),
    "T-200², 10 classes, ITER(D)": Row(0.2311, 9758.5, 0.03071, -1.1513),
}
NETWORKS = {
    "T-600": {"base": 0.1540, "appr": 0.1432, "iter": 0.1198, "iter-d": 0.1199, "iter-m": 0.1255},
    "T-300-300": {"base": 0.1686, "appr": 0.1434, "iter": 0.1249, "iter-d": 0.1244, "iter-m": 0.1308},
    "T-200-200-10": {"base": 0.4165, "appr": 0.2621, "iter": 0.2145, "iter-d": 0.2311, "iter-m": 0.2728},
}
"""Printed bounds by network and method."""


def again(row: Row, corrected: bool = False) -> float:
    """kl⁻¹(error, B_RE) with j ≥ 1; `corrected`, with the error's own confidence on top.

    >>> round(again(BELOW_THE_CAP["T-600 ITER"]), 4)
    0.1198
    """
    j = bounds.PriorGrid().index(row.half_log_lambda)
    error = bounds.error_limit(row.error, DRAWS, DELTA_DRAWS) if corrected else row.error
    return float(bounds.kl_inverse(error, bounds.relative_entropy_rate(row.kl, j, EXAMPLES)))


def differences() -> dict[str, float]:
    """Ours minus what is printed, by row."""
    return {name: again(row) - row.bound for name, row in {**BELOW_THE_CAP, **AT_THE_CAP}.items()}
