import json
import subprocess
import sys
from pathlib import Path

import pytest
import toy_descent

from layerwise.experiments import records

HERE = Path(__file__).parent


@pytest.fixture
def toy():
    return toy_descent.EXPERIMENT


@pytest.fixture
def journal_path(tmp_path: Path) -> Path:
    return records.path_of(tmp_path, "toy", "smoke", "01234567")


@pytest.fixture
def layerwise_command():
    """Starts `python -m layerwise` in a process of its own, which can import the toy experiment."""

    def start(*words: str, **options) -> subprocess.Popen:
        path, words_given = json.dumps([str(HERE), *map(str, sys.path)]), json.dumps(list(words))
        code = f"import sys; sys.path[:0] = {path}; from layerwise.cli.main import main; sys.exit(main({words_given}))"
        return subprocess.Popen([sys.executable, "-c", code], text=True, **options)

    return start
