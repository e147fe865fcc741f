"""The models the benchmarks measure: an autoencoder, a ResNet and a GPT, each with one batch of random data.

`problem(name)` gives the size that is timed; `problem(name, tiny=True)` the same architecture in a size at
which every quantity can be computed by hand.
"""

import copy
import itertools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """A model, one batch, and the likelihood that turns outputs into a loss."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: str  # "categorical" or "gaussian"

    def example_loss_sum(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sum over examples (and tokens) of −log p(y | f): cross-entropy or ½‖f − y‖²."""
        y = self.y if y is None else y
        if self.likelihood == "gaussian":
            return 0.5 * (f - y).square().sum()
        return F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum")

    def loss(self, f: Tensor) -> Tensor:
        """The training loss, a mean over loss terms."""
        return self.example_loss_sum(f) / self.terms()

    def sample_labels(self, f: Tensor) -> Tensor:
        """Labels drawn from the model's own predictive distribution."""
        f = f.detach()
        if self.likelihood == "gaussian":
            return f + torch.randn_like(f)
        return torch.multinomial(f.flatten(0, -2).softmax(-1), 1).view(self.y.shape)

    def examples(self) -> int:
        return len(self.x)

    def terms(self) -> int:
        """Number of loss terms in the batch: examples, or examples × tokens."""
        return self.y.numel() if self.likelihood == "categorical" else len(self.y)

    def layers(self, model: nn.Module | None = None) -> dict[str, nn.Module]:
        """The layers with Kronecker factors in every system measured here: Linear and Conv2d."""
        modules = (self.model if model is None else model).named_modules()
        return {name: m for name, m in modules if isinstance(m, nn.Linear | nn.Conv2d)}

    def copy(self) -> nn.Module:
        """A model of its own for each system: some leave hooks behind, some replace modules."""
        return copy.deepcopy(self.model)

    def first(self, n: int, name: str) -> "Problem":
        """The same model on the first `n` examples."""
        return replace(self, name=name, x=self.x[:n], y=self.y[:n])

    def to(self, device: str) -> "Problem":
        return replace(self, model=self.model.to(device), x=self.x.to(device), y=self.y.to(device))


def autoencoder(widths: tuple[int, ...]) -> nn.Sequential:
    """Mirrored fully connected autoencoder; tanh between layers, linear code and output."""
    sizes = (*widths, *widths[-2::-1])
    code = len(widths) - 2
    modules: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        modules.append(nn.Linear(n_in, n_out))
        if i not in (code, len(sizes) - 2):
            modules.append(nn.Tanh())
    return nn.Sequential(*modules)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    """CIFAR-style ResNet-18: stages of 1, 2, 4, 8 × `width` channels, two basic blocks each."""

    def __init__(self, width: int, classes: int, stages: int = 4) -> None:
        super().__init__()
        channels = [width * 2**i for i in range(stages)]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        c_in = width
        for i, c in enumerate(channels):
            blocks += [BasicBlock(c_in, c, 1 if i == 0 else 2), BasicBlock(c, c, 1)]
            c_in = c
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and a GELU perceptron of four times the width.

    Queries, keys and values come of one matrix, or of three (`split`).
    """

    def __init__(self, width: int, heads: int, split: bool = False) -> None:
        super().__init__()
        self.heads, self.split = heads, split
        self.norm1 = nn.LayerNorm(width)
        if split:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        else:
            self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def _attention_inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [N, heads, T, D / heads]."""
        N, T, D = x.shape
        if self.split:
            return tuple(m(x).view(N, T, self.heads, D // self.heads).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.qkv(x).view(N, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        N, T, D = x.shape
        q, k, v = self._attention_inputs(self.norm1(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(N, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder with learned positions and an untied head; outputs [N, T, vocabulary]."""

    def __init__(self, depth: int, width: int, heads: int, vocabulary: int, length: int, split: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, split) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def _autoencoder_problem(tiny: bool) -> Problem:
    widths, n = ((9, 7, 6, 5, 3), 8) if tiny else ((784, 1000, 500, 250, 30), 512)
    x = torch.rand(n, widths[0])
    return Problem("autoencoder", autoencoder(widths), x, x, "gaussian")


def _resnet_problem(tiny: bool) -> Problem:
    width, side, n, stages = (3, 6, 5, 2) if tiny else (16, 32, 128, 4)
    model = ResNet(width, classes=10, stages=stages).eval()  # BatchNorm mixes no examples in eval mode
    return Problem("resnet", model, torch.randn(n, 3, side, side), torch.randint(10, (n,)), likelihood="categorical")


def _gpt_problem(tiny: bool) -> Problem:
    depth, width, heads, vocabulary, n, length = (2, 8, 2, 7, 3, 4) if tiny else (6, 384, 6, 1024, 8, 128)
    model = GPT(depth, width, heads, vocabulary, length)
    x = torch.randint(vocabulary, (n, length))
    return Problem("gpt", model, x, torch.randint(vocabulary, (n, length)), "categorical")


_PROBLEMS = {"autoencoder": _autoencoder_problem, "resnet": _resnet_problem, "gpt": _gpt_problem}
MODELS = tuple(_PROBLEMS)
SMALL_BATCH = "autoencoder-16"
"""The autoencoder with batch 16: its exact Fisher needs 784 backward passes, too many at batch 512."""


def problem(name: str, device: str = "cpu", tiny: bool = False) -> Problem:
    """The named problem, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == SMALL_BATCH:
            return _autoencoder_problem(tiny).first(16, SMALL_BATCH).to(device)
        return _PROBLEMS[name](tiny).to(device)
