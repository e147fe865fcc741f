"""Which hidden matrices of the zoo's models get a member's own update, after two training steps with its defaults."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_entries import Entry, ZooBatch

import layerwise as lw
from layerwise.optim.engine import Layerwise
from layerwise.optim.rule import Shape

MEMBERS = ("KFAC", "EKFAC", "FOOF", "Shampoo", "SOAP", "Muon")
PLACE = re.compile(r"\.\d+(?=[.\[]|$)")


@dataclass(frozen=True)
class Updates:
    """Of one model: shares of its hidden matrices, by number of entries, and what is left out."""

    name: str
    shares: dict[str, float]
    """By member, of the small configuration."""
    at_default: dict[str, float]
    """The same of the model class's default configuration, by names and sizes; nothing where it has none."""
    fallen: dict[str, str]
    """From names of parameters, blocks of one kind written once, to the reason, where a member falls back."""


def training_loss(entry: Entry, model: nn.Module, batch: ZooBatch) -> Tensor:
    """The model's own where it has one, else that of the entry's likelihood."""
    given = batch.given()
    if isinstance(given, dict) and entry.likelihood == "categorical":
        return model(**given).loss
    out = model(**batch.x) if isinstance(batch.x, dict) else model(batch.x)
    f = out if isinstance(out, Tensor) else out[0]
    if entry.likelihood == "gaussian":
        return F.mse_loss(f, batch.y)
    return F.cross_entropy(f.flatten(0, -2), batch.y.flatten())


def trained(entry: Entry, member: str, steps: int = 2) -> tuple[nn.Module, Layerwise]:
    """A model after so many steps with a member's defaults, each on another batch."""
    model = entry.model().train()
    opt = getattr(lw.optim, member)(model)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.filterwarnings("ignore", message=".*(empirical Fisher|get the fallback's update|mkldnn_matmul)")
        for step in range(steps):
            opt.zero_grad()
            training_loss(entry, model, entry.batches()[step % len(entry.sizes)]).backward()
            opt.step()
    return model, opt


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with two or more axes longer than one, but for tables of embeddings and the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    left_out = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) or m is head}
    return {
        name: p
        for name, p in model.named_parameters()
        if id(p) not in left_out and sum(size > 1 for size in p.shape) > 1
    }


def treated(model: nn.Module, opt: Layerwise) -> dict[str, str | None]:
    """For every hidden matrix why it does not get the member's own update; None where it does.

    A layer whose statistics have never come is not counted as treated: it would take the plain gradient's step.
    """
    hidden, found = hidden_matrices(model), dict[str, str | None]()
    for stack in opt._stacks or []:
        for spec, groups in stack.slices():
            why = opt._choice.why_fallback(spec, stack.group)
            counts = [stack.state[f"{side}_count"][groups] for side in ("P", "Q") if f"{side}_count" in stack.state]
            if why is None and any(not bool((count > 0).all()) for count in counts):
                why = "its statistics have not come"
            for name in spec.parameters:
                if name in hidden:
                    found[name] = found.get(name) or why
    return found


def updates(entry: Entry) -> Updates:
    """Of one model, for all members."""
    shares, at_default, fallen = {}, {}, dict[str, str]()
    for member in MEMBERS:
        model, opt = trained(entry, member)
        reasons, sizes = treated(model, opt), {name: p.numel() for name, p in hidden_matrices(model).items()}
        shares[member] = sum(sizes[name] for name, why in reasons.items() if why is None) / sum(sizes.values())
        fallen |= {PLACE.sub(".*", name): why for name, why in reasons.items() if why is not None}
        if hasattr(model, "config"):
            at_default[member] = _share_at_default_size(model, opt, reasons)
    return Updates(entry.name, shares, at_default, fallen)


def _share_at_default_size(model: Any, opt: Layerwise, reasons: dict[str, str | None]) -> float:
    """The same names in a model of the default configuration; sides beyond `max_factor` count as the rule says."""
    known = {PLACE.sub(".*", name): why for name, why in reasons.items()}
    own = total = 0
    for name, p in _default_matrices(model):
        o, i = (p.shape[0], p[0].numel()) if p.ndim != 3 else p.shape[-2:]
        treats = known[PLACE.sub(".*", name)] is None
        total += p.numel()
        own += p.numel() * (treats and opt.rule.accepts(Shape(1, o, i, torch.float32, torch.device("cpu"))) is None)
    return own / total


def _default_matrices(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    config = type(model.config)()
    with torch.device("meta"):
        yield from hidden_matrices(type(model)(config)).items()
