"""A small transformer that predicts the next character: members of the family beside Adam, same budget of steps.

All have Adam's rate, and nothing else is set. The text is tiny Shakespeare if the variable LAYERWISE_DATA names a
folder with text/tinyshakespeare.txt, else a few lines that are repeated: then the held-out lines were seen in training.
Run `python examples/character_model.py --help`.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw

LENGTH, BATCH, WIDTH, HEADS = 32, 16, 48, 4
EMBEDDED = """\
Shall I compare thee to a summer's day? Thou art more lovely and more temperate: rough winds do shake the darling
buds of May, and summer's lease hath all too short a date; sometime too hot the eye of heaven shines, and often is his
gold complexion dimm'd; and every fair from fair sometime declines, by chance or nature's changing course untrimm'd;
but thy eternal summer shall not fade, nor lose possession of that fair thou ow'st; nor shall death brag thou wander'st
in his shade, when in eternal lines to time thou grow'st: so long as men can breathe or eyes can see, so long lives
this, and this gives life to thee.
"""

RATE = 3e-3
METHODS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=RATE),
    # singular values, exact at this size; Muon's default is a short iteration in bfloat16
    "muon": lambda model: lw.optim.Muon(model, lr=RATE, weight_decay=0.0, orthogonalize="polar"),
    "soap": lambda model: lw.optim.SOAP(model, lr=RATE),
    "kfac": lambda model: lw.optim.KFAC(model, lr=RATE),
}


def text() -> str:
    """Tiny Shakespeare where it is at hand, else the lines above, so that the script needs no download."""
    path = Path(os.environ.get("LAYERWISE_DATA", "")) / "text" / "tinyshakespeare.txt"
    return path.read_text(encoding="utf-8") if path.is_file() else EMBEDDED * 20


class Block(nn.Module):
    """Pre-norm causal attention and a perceptron of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        N, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(N, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(N, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharacterModel(nn.Module):
    """Two blocks; outputs [N, T, V]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(WIDTH, HEADS), Block(WIDTH, HEADS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def batches(data: Tensor, steps: int, generator: torch.Generator, size: int = BATCH):
    """Windows of LENGTH characters and the characters that follow each, `steps` times `size` of them."""
    windows = data.unfold(0, LENGTH + 1, 1)
    for _ in range(steps):
        chosen = windows[torch.randint(len(windows), (size,), generator=generator)]
        yield chosen[:, :-1], chosen[:, 1:]


def train(name: str, data: Tensor, held_out: Tensor, steps: int, seed: int) -> tuple[float, float, float]:
    """Held-out loss half-way and at the end, in nats a character, and the seconds of the training."""
    torch.manual_seed(seed)
    model = CharacterModel(int(torch.cat([data, held_out]).max()) + 1)
    opt = METHODS[name](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / steps)
    losses, seconds = [], 0.0
    for number, (x, y) in enumerate(batches(data, steps, torch.Generator().manual_seed(seed)), start=1):
        start = time.perf_counter()
        opt.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        schedule.step()
        seconds += time.perf_counter() - start
        if number in (max(steps // 2, 1), steps):
            losses.append(evaluate(model, held_out))
    return losses[0], losses[-1], seconds


def evaluate(model: nn.Module, held_out: Tensor) -> float:
    """Mean loss on windows that are the same for every method."""
    model.eval()
    with torch.no_grad():
        x, y = next(batches(held_out, 1, torch.Generator().manual_seed(0), 320))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    model.train()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="which optimizers")
    parser.add_argument("--steps", type=int, default=600, help="batches of 16 windows of 32 characters")
    parser.add_argument("--quick", action="store_true", help="three steps, to see that it runs")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error("give at least one step")
    written = text()
    letters = {c: i for i, c in enumerate(sorted(set(written)))}
    data = torch.tensor([letters[c] for c in written])
    cut = len(data) * 9 // 10
    steps = 3 if given.quick else given.steps
    print(f"{len(data)} characters, {len(letters)} different ones; loss in nats a character on the last tenth")
    print("Rates are set by hand, not tuned alike: this shows use, not rank.")
    print(f"{'method':<8}{f'{steps // 2} steps':>12}{f'{steps} steps':>12}{'ms a step':>12}")
    for name in given.methods:
        half, end, seconds = train(name, data[:cut], data[cut:], steps, given.seed)
        print(f"{name:<8}{half:>12.3f}{end:>12.3f}{1e3 * seconds / steps:>12.1f}")


if __name__ == "__main__":
    main()
