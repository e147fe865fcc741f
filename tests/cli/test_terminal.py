"""On a terminal: a bar with the time left, and a table that rich draws."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="needs rich: pip install 'layerwise[cli]'")
pty = pytest.importorskip("pty", reason="needs a system with terminals")


def test_bar_and_table(tmp_path):
    import layerwise

    path = os.pathsep.join([str(Path(layerwise.__file__).parents[1]), str(Path(__file__).parents[1] / "experiments")])
    words = ["run", "toy_descent:EXPERIMENT", "--preset", "smoke", "--pause", "0.3", "--out", str(tmp_path)]
    child, terminal = pty.fork()
    if child == 0:
        environment = os.environ | {"PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": "140"}
        os.execve(sys.executable, [sys.executable, "-m", "layerwise", *words], environment)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    _, status = os.waitpid(child, 0)
    text = shown.decode(errors="replace")
    assert os.waitstatus_to_exitcode(status) == 0, text
    assert "toy-descent" in text
    assert "/4" in text  # the bar of the run
    assert "left" in text
    assert "descent" in text.replace("toy-descent", "")  # that of a cell
    assert "/6" in text
    assert "as expected (held)" in text
    assert "\x1b[" in text  # colour
