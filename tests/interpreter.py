"""Triton's interpreter, which runs kernels on a CPU: what tests of kernels share.

Tests that are marked ``interpreted`` run in it under ``TRITON_INTERPRET=1``, which Triton reads when it is imported:
``make test-interpreted``. Where Triton is at hand, other runs begin a process for each file of them
(`test_interpreted.py`). `conftest.py` gives them what they need there.
"""

import importlib.metadata
import importlib.util
import os

import numpy as np
import pytest

ASKED = os.environ.get("TRITON_INTERPRET") == "1"


def _missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return "needs triton: pip install triton"
    if _numbers(np.__version__) >= (2, 4):
        return "Triton's interpreter needs numpy < 2.4 (loops of its range)"
    refuses = _numbers(importlib.metadata.version("triton")) >= (3, 9)
    return "the interpreter of Triton 3.9 refuses masks made with a gate: pip install 'triton<3.9'" if refuses else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


MISSING = _missing()
"""What the interpreter lacks here, if anything."""
INTERPRETED = ASKED and not MISSING

only_interpreted = pytest.mark.skipif(not INTERPRETED, reason=MISSING or "run with TRITON_INTERPRET=1")

WARNINGS = (  # numpy's, which the interpreter computes with
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:(invalid value|overflow|divide by zero|All-NaN):RuntimeWarning",
)


def marks() -> list[pytest.MarkDecorator]:
    """What a test that is marked ``interpreted`` gets besides."""
    if ASKED and MISSING:
        return [pytest.mark.skip(reason=MISSING)]
    return [pytest.mark.filterwarnings(text) for text in WARNINGS] if INTERPRETED else []
