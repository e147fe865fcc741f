"""Run by `test_killed.py`: a runner that is killed again and again with SIGKILL, each time in a process of its own.

The processes are forked from this one, so that each begins at once instead of importing torch for seconds.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import toy_descent

from layerwise.experiments.manifest import code_version, hardware, libraries
from layerwise.experiments.records import read
from layerwise.experiments.runner import run

RATES = tuple(k / 40 for k in range(1, 31))


def main(out: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    code_version(), libraries(), hardware()  # asked once here, not in each of the killed
    config = replace(toy_descent.Config(), rates=RATES, seeds=2, steps=400, pause=0.02)
    chance, landed, finished, path = random.Random(seed), 0, set(), None
    while True:
        child = os.fork()
        if child == 0:
            run(toy_descent.EXPERIMENT, config, preset="smoke", out=out)
            os._exit(0)
        if landed < kills:
            time.sleep(chance.uniform(0.0, 0.1))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        path = next(out.glob("*/*.jsonl"), path)
        now = read(path).finished() if path else set()
        assert finished <= now, "a finished seed is lost"
        finished = now
        if os.WIFSIGNALED(status):
            landed += 1
        elif landed < kills:
            raise AssertionError("the run was finished before all kills")
        else:
            break
    print(json.dumps({"kills": landed, "path": str(path)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
