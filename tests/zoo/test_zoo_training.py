"""Every member trains every model of the zoo: what it cannot treat falls back with a reason, and nothing raises."""

import pytest
import torch
from zoo_entries import Entry, entries
from zoo_updates import MEMBERS, hidden_matrices, trained, treated

ALL = (*MEMBERS, "MahalanobisSpectral", "LocoProp", "NGD")
ELEMENTWISE = "A_log"
"""Mamba's decay rates have two axes and multiply elementwise: no inputs, no output gradients, no Kronecker factors."""


def check(entry: Entry, member: str) -> None:
    model, opt = trained(entry, member)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    if member not in MEMBERS:
        return
    reasons, sizes = treated(model, opt), {name: p.numel() for name, p in hidden_matrices(model).items()}
    assert {*reasons} == {*sizes}
    left = {name: why for name, why in reasons.items() if why is not None and not name.endswith(ELEMENTWISE)}
    assert sum(sizes[name] for name in left) <= 0.05 * sum(sizes.values()), left


@pytest.mark.filterwarnings("ignore:.*have a gradient but no statistics")  # NGD, of rows that are no example's
@pytest.mark.parametrize("member", ["KFAC", "Muon", "NGD"])
@pytest.mark.parametrize("entry", entries(quick=True))
def test_a_few_members(entry: Entry, member: str, untyped: None):
    check(entry, member)


@pytest.mark.filterwarnings("ignore:.*have a gradient but no statistics")
@pytest.mark.parametrize("entry", entries())
def test_every_member(entry: Entry, untyped: None):
    for member in ALL:
        check(entry, member)


@pytest.mark.slow
@pytest.mark.parametrize("member", ALL)
def test_contrastive_clip_with_positions_that_all_texts_share(member: str, untyped: None):
    """Examples interact, and position ids have the shape (1, L)."""
    pytest.importorskip("transformers")
    import zoo_hugging_face

    import layerwise as lw

    torch.manual_seed(0)
    model = zoo_hugging_face.clip().train()
    opt = getattr(lw.optim, member)(model)
    warned = {"NGD": pytest.warns(UserWarning, match="no statistics")}.get(member)
    for n, length in ((4, 5), (3, 6), (4, 5)):
        ids = torch.randint(3, 13, (n, length))
        ids[:, -1] = 2
        x = {"input_ids": ids, "pixel_values": torch.randn(n, 3, 8, 8)}
        opt.zero_grad()
        model(**x, position_ids=torch.arange(length).unsqueeze(0), return_loss=True).loss.backward()
        if warned is None:
            opt.step()
        else:
            with warned:
                opt.step()
            warned = None
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
