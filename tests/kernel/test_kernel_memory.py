"""A kernel keeps to its `memory=`: measured from outside, on a process of its own."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from torch import nn
import layerwise as lw

torch.set_num_threads(1)
torch.manual_seed(0)
memory, n = int(sys.argv[1]), int(sys.argv[2])


def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def net(width):
    body = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    body += [nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8 * width, 10))


lw.ntk(net(2), torch.randn(2, 3, 8, 8)).matrix()  # libraries and threads are there
model, x = net(32), torch.randn(n, 3, 24, 24)
before = peak()
K = lw.ntk(model, x, memory=memory)
K.matrix()
tiled = peak() - before
lw.ntk(model, x, memory=2**30).matrix()
print(K.plan().tiles, tiled, peak() - before)
"""
SLACK = 10 * 2**20
"""For what PyTorch's own operations use for a while, and what the allocator does not give back."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tiled_kernel_stays_within_its_memory():
    """And one that may use more does, or the small budget would show nothing."""
    memory = 16 * 2**20
    command = [sys.executable, "-c", PROGRAM, str(memory), "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    tiles, tiled, free = map(int, done.stdout.split())
    assert tiles > 1
    assert tiled <= memory + SLACK, f"{tiled / 2**20:.0f} MiB"
    assert free > memory + SLACK, f"{free / 2**20:.0f} MiB"
