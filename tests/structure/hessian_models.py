"""Networks of these tests, and the Hessians of their layers by `torch.func`, in float64."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

CLASSES = 4


def mlp(bias: bool = True, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers = [nn.Linear(6, 5, bias), activation(), nn.Linear(5, 5, bias), activation(), nn.Linear(5, CLASSES, bias)]
    return nn.Sequential(*layers).double()


def batch(n: int = 12) -> tuple[Tensor, Tensor]:
    return torch.rand(n, 6, dtype=torch.float64), torch.randint(CLASSES, (n,))


def in_parts(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


def convolutional() -> nn.Module:
    first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 2, groups=2)
    tail = nn.Flatten(), nn.Linear(24, CLASSES)
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), *tail).double()


def images(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 6, 6, dtype=torch.float64), torch.randint(CLASSES, (n,))


class Attention(nn.Module):
    """Tokens in, logits at every position out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(h + self.attention(h, h, h, need_weights=False)[0])


def outputs(model: nn.Module, name: str, x: Tensor):
    def f(W: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):  # the fused kernels have no second derivative
            return functional_call(model, {name: W}, (x,))

    return f, dict(model.named_parameters())[name].detach()


def hessian_of(model: nn.Module, data: tuple[Tensor, Tensor], name: str) -> Tensor:
    """``∂² (1/N Σ ℓ) / ∂W²``, [D, D] in the order of the parameter."""
    f, W = outputs(model, name, data[0])

    def loss(W: Tensor) -> Tensor:
        z = f(W)
        return nn.functional.cross_entropy(z.flatten(0, -2), data[1].flatten(), reduction="sum") / len(data[0])

    return jacrev(jacrev(loss))(W).reshape(W.numel(), -1).detach()


def gauss_newton_of(model: nn.Module, data: tuple[Tensor, Tensor], name: str) -> Tensor:
    """``1/N Σ Jᵀ (diag p − ppᵀ) J``."""
    f, W = outputs(model, name, data[0])
    p = f(W).detach().softmax(-1).flatten(0, -2)
    J = jacrev(f)(W).detach().reshape(*p.shape, -1)
    A = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.einsum("rci,rcd,rdj->ij", J, A, J) / len(data[0])


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())
