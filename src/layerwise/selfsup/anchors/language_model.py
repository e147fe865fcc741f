"""A language model as its output layer sees it: the weights of that layer, and the states that it is given."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.optional import require
from layerwise.selfsup.anchors.corpus import Window
from layerwise.selfsup.anchors.log_partition import Dictionary, Transform

CONTEXT = 1024
"""The longest window that is taken by default, and the one of a model that does not say."""
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Logits that are computed again differ by so much of their size; in single precision by a thousandth."""
SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale", "mup_width_multiplier")
"""What configurations call a change of the logits after the head."""


def load(name: str | os.PathLike[str]) -> nn.Module:
    """A causal language model of Hugging Face, from a folder or from what is already on this machine.

    Nothing is downloaded here, whatever the environment says.
    """
    hub = require("transformers", "transformers", "models by name or folder", extra="models")
    with _worded(name, "a causal language model"):
        return hub.AutoModelForCausalLM.from_pretrained(os.fspath(name), local_files_only=True).eval()


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """The tokenizer that lies beside a model."""
    hub = require("transformers", "transformers", "tokenizers by name or folder", extra="models")
    with _worded(name, "a tokenizer"):
        return hub.AutoTokenizer.from_pretrained(os.fspath(name), local_files_only=True)


class _worded:
    """Errors of `from_pretrained`, of many kinds, in one sentence."""

    def __init__(self, name: str | os.PathLike[str], what: str) -> None:
        self.name, self.what = os.fspath(name), what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            folder = Path(self.name).is_dir()
            where = f"the folder {self.name!r}" if folder else f"{self.name!r}, which is no folder here"
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            do = f"save one there with save_pretrained, or first type: hf download {self.name}"
            given = f"{where} ({type(error).__name__}: {reason})"
            raise InputError(describe(given, f"{self.what} on this machine; none is downloaded", do)) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A model and its output layer."""

    model: nn.Module
    head: nn.Module
    dictionary: Dictionary
    vocabulary: int
    """Rows of the input embedding: token ids must be below."""
    context: int
    """Tokens of a window, by default."""
    longest: int | None = None
    """Tokens of a window that the model has positions for, where it says so."""

    @property
    def device(self) -> torch.device:
        """Of the head."""
        return self.dictionary.atoms.device


def open_model(
    model: nn.Module, head: nn.Module | str | None = None, transform: Transform | None = None
) -> LanguageModel:
    """Find the output layer, and what it multiplies with."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        given = f"{type(model).__name__}, an encoder with a decoder"
        raise InputError(describe(given, "a model that maps tokens to logits", "give its decoder, with head="))
    found = _head(model, head)
    weight, bias = getattr(found, "weight", None), getattr(found, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        given = f"a head of type {type(found).__name__} without a matrix of weights"
        raise InputError(describe(given, "a linear layer, one row a word", "pass the output layer as head="))
    if transform is None and (named := {n: v for n in SCALES if (v := getattr(config, n, None)) not in (None, 1, 1.0)}):
        given = f"a model whose configuration has {', '.join(f'{n}={v}' for n, v in named.items())}"
        raise InputError(describe(given, "logits that are h @ W.T", _transform_advice(named)))
    embedding = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
    rows = len(embedding) if isinstance(embedding, Tensor) else len(weight)
    stated = next((int(v) for n in ("n_positions", "max_position_embeddings") if (v := getattr(config, n, None))), None)
    atoms = weight.detach()
    atoms = atoms if atoms.dtype == torch.float64 else atoms.float()
    kept = None if bias is None else bias.detach().to(atoms.dtype)
    dictionary = Dictionary(atoms=atoms, bias=kept, transform=transform)
    context = min(stated or CONTEXT, CONTEXT)
    return LanguageModel(
        model=model, head=found, dictionary=dictionary, vocabulary=rows, context=context, longest=stated
    )


def _transform_advice(named: Mapping[str, Any]) -> str:
    if "final_logit_softcapping" in named:
        cap = named["final_logit_softcapping"]
        return f"pass the same change as transform=, here e.g. transform=lambda z: {cap} * torch.tanh(z / {cap})"
    return "pass the same change as transform=, e.g. transform=lambda z: z * scale"


def _head(model: nn.Module, head: nn.Module | str | None) -> nn.Module:
    modules = dict(model.named_modules())
    if isinstance(head, str):
        if head not in modules or not head:
            raise NameLookupError(unknown("module", head, [name for name in modules if name]))
        return modules[head]
    found = getattr(model, "get_output_embeddings", lambda: None)() if head is None else head
    if not isinstance(found, nn.Module):
        given = f"{type(model).__name__}, which does not say what its output embedding is"
        rows = {m.num_embeddings for m in modules.values() if isinstance(m, nn.Embedding)}
        likely = [name for name, m in modules.items() if isinstance(m, nn.Linear) and m.out_features in rows]
        do = f"pass head=, e.g. head={likely[-1]!r}" if likely else "pass head=, or its states and atoms to anchors_of"
        raise InputError(describe(given, "a model with an output embedding", do))
    if all(module is not found for module in modules.values()):
        given = f"head of type {type(found).__name__}, which is not a module of the model"
        raise InputError(describe(given, "a module inside the model", "pass e.g. head=model.lm_head"))
    return found


# --- what the head sees ----------------------------------------------------------------------------------------


class HeadInput:
    """The input of the head in a forward pass."""

    def __init__(self, opened: LanguageModel) -> None:
        self.opened = opened
        self.seen: list[Tensor] = []
        self.checked = False

    def __enter__(self) -> "HeadInput":
        self._handle = self.opened.head.register_forward_pre_hook(self._keep, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _keep(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self.seen.extend([*args, *kwargs.values()][:1])

    def states(self, window: Window) -> Float[Tensor, "N d"]:
        """One row a position that counts; the first time, logits are computed again and compared with the model's."""
        self.seen.clear()
        batch = _to(window.batch, self.opened.device)
        output = _call(self.opened.model, batch)
        if len(self.seen) != 1:
            given = f"a head that was called {len(self.seen)} times in one forward pass"
            raise InputError(describe(given, "one call", "pass as head= the layer that makes the logits"))
        (h,) = self.seen
        if h.shape[-1] != self.opened.dictionary.atoms.shape[1]:
            given = (
                f"a head whose input has width {h.shape[-1]}, with weights {tuple(self.opened.dictionary.atoms.shape)}"
            )
            raise InputError(describe(given, "logits that are h @ W.T", "pass as head= a linear layer"))
        if not self.checked:
            self._check(h, output)
            self.checked = True
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        kept = h.reshape(-1, h.shape[-1]) if mask is None else h[mask.bool()]
        return kept[window.first :].to(self.opened.dictionary.atoms.dtype)

    def _check(self, h: Tensor, output: Any) -> None:
        logits = _logits(output, self.opened.dictionary.words)
        if logits is None or logits.shape[:-1] != h.shape[:-1]:
            given = (
                f"a model whose output ({type(output).__name__}) has no logits of {self.opened.dictionary.words} words"
            )
            raise InputError(describe(given, "logits of every position", "pass as head= the layer that makes them"))
        rows, told = h.reshape(-1, h.shape[-1])[:64], logits.reshape(-1, logits.shape[-1])[:64].float()
        own = self.opened.dictionary.logits(rows.to(self.opened.dictionary.atoms.dtype)).float()
        allowed = TOLERANCE.get(h.dtype, 1e-3) * max(1.0, float(told.abs().max()))
        worst = float((own - told).abs().max())
        if not worst <= allowed:  # NaN as well
            formula = "transform(h @ W.T)" if self.opened.dictionary.transform else "h @ W.T"
            given = f"logits that differ from {formula} by {worst:.3g}"
            do = "if the model scales or caps its logits after the head, pass the same change as transform="
            raise InputError(describe(given, f"a difference of at most {allowed:.3g}", do))


def _logits(output: Any, words: int) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.shape[-1] == words else None
    if isinstance(getattr(output, "logits", None), Tensor):
        return _logits(output.logits, words)
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((part for part in parts if isinstance(part, Tensor) and part.shape[-1:] == (words,)), None)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    if hasattr(model, "get_output_embeddings"):
        return model(input_ids=batch, use_cache=False)
    return model(batch)


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _to(value, device) for name, value in batch.items()}
    return type(batch)(_to(value, device) for value in batch) if isinstance(batch, tuple | list) else batch
