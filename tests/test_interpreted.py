"""Each file of kernels' tests in Triton's interpreter, in a process of its own, where that is at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreter import ASKED, MISSING

TESTS = Path(__file__).parent
LONG = {"optim/cuda/test_steps_interpreted.py"}
"""A minute: by `make test-interpreted` alone."""
FILES = sorted(
    path.relative_to(TESTS).as_posix()
    for path in TESTS.rglob("test_*.py")
    if path != Path(__file__) and "pytest.mark.interpreted" in path.read_text()
)
ELSEWHERE = MISSING or ("this is the interpreter" if ASKED else "")


def test_the_files_are_found():
    assert set(FILES) > LONG
    assert "optim/cuda/test_elementwise.py" in FILES


@pytest.mark.skipif(bool(ELSEWHERE), reason=ELSEWHERE or "-")
@pytest.mark.parametrize("file", [file for file in FILES if file not in LONG])
def test_kernels_in_the_interpreter(file: str):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpreted", str(TESTS / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
