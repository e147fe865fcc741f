"""At a rate at which K-FAC's updates collapse into single directions, a bound on singular values keeps losses down."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from gpt_block import Block
from layerwise.optim.step import spectral_cap

TEXT = Path(os.environ.get("LAYERWISE_DATA", "")) / "text" / "tinyshakespeare.txt"
WIDTH, HEADS, LENGTH, BATCH = 128, 4, 64, 16
RATE, WARM_UP, STEPS = 1e-2, 40, 40


class Characters(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(2))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, letters, bias=False)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, 0.0, 0.01 if into_stream else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight)))


def late_loss(data: Tensor, letters: int, seed: int) -> float:
    """Of the second half of a short training, while the rate still rises."""
    torch.manual_seed(seed)
    model, losses, g = Characters(letters), [], torch.Generator().manual_seed(seed)
    overrides = {name: {"update": "fallback"} for name in ("tokens", "positions", "head")}
    opt = lw.optim.KFAC(model, RATE, betas=(0.9, 0.99), weight_decay=0.1, factor_every=10, overrides=overrides)
    for step in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = RATE * (step + 1) / WARM_UP
        start = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=g)
        window = data[start + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(float(loss.detach()))
    return sum(losses[STEPS // 2 :]) / (STEPS // 2)


@pytest.mark.usefixtures("untyped")
@pytest.mark.skipif(not TEXT.is_file(), reason="needs text/tinyshakespeare.txt in the folder LAYERWISE_DATA")
def test_losses_of_kfac_do_not_jump(monkeypatch: pytest.MonkeyPatch):
    text = TEXT.read_text(encoding="utf-8")
    place = {letter: number for number, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([place[letter] for letter in text])
    bounded = late_loss(data, len(place), seed=0)
    monkeypatch.setattr(spectral_cap, "TIMES", 1e9)
    assert late_loss(data, len(place), seed=0) > bounded + 0.1
