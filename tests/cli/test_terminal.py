"""On a terminal: a bar with the time left, and a table that rich draws."""

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="needs rich: pip install 'layerwise[cli]'")
pty = pytest.importorskip("pty", reason="needs a system with terminals")


def shown_on_a_terminal(words: list[str], columns: int) -> str:
    """What a command writes to a terminal of so many columns."""
    import layerwise

    path = os.pathsep.join([str(Path(layerwise.__file__).parents[1]), str(Path(__file__).parents[1] / "experiments")])
    child, terminal = pty.fork()
    if child == 0:
        environment = os.environ | {"PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": str(columns)}
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
    return text


RUN = ["run", "toy_descent:EXPERIMENT", "--preset", "smoke", "--pause", "0.3", "--out"]


def test_bar_and_table(tmp_path):
    text = shown_on_a_terminal([*RUN, str(tmp_path)], 140)
    assert "toy-descent" in text
    assert "/4" in text  # the bar of the run
    assert "left" in text
    assert "descent" in text.replace("toy-descent", "")  # that of a cell
    assert "/6" in text
    assert "as expected (held)" in text
    assert "\x1b[" in text  # colour


def test_a_narrow_terminal_keeps_the_numbers(tmp_path):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown_on_a_terminal([*RUN, str(tmp_path)], 40))
    lines = [line for line in re.split(r"[\r\n]+", text) if "left" in line]
    assert any(re.search(r"\d/4 +\d:\d\d:\d\d +left \d:\d\d:\d\d", line) for line in lines), text
    assert all(len(line.rstrip()) <= 40 for line in lines), lines
