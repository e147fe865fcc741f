"""`Checkpointed`: an optimizer's state in checkpoints and pickles, where parameters are added, or the model changes."""

from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.sharded import named_parameters
from layerwise.layers.table import LayerTable
from layerwise.optim.model_changes import ModelSnapshot, follow_groups, owners, renamed, renamed_layers
from layerwise.optim.options import with_own_rate
from layerwise.optim.parameters import BareParameters, in_pairs
from layerwise.optim.report import Notices
from layerwise.optim.rule import Health, UpdateRule
from layerwise.optim.sharding.one_rank import LocalParameters
from layerwise.optim.sharding.sharding import Sharding
from layerwise.optim.statistics.accumulate import Accumulator
from layerwise.optim.statistics.hooks import Capture
from layerwise.optim.statistics.labels import Labels
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import Executor

MADE_ANEW = (
    "_capture", "_stacks", "_accumulator", "_executor", "_sharding", "_on_one_rank", "_snapshot", "_rehearsed",
)  # fmt: skip
"""What a copy has of its own: hooks, identities of modules and parameters, and what is built from its options."""


class Checkpointed(torch.optim.Optimizer):
    """What an optimizer of layers saves and loads: the state of every layer alone, and a few numbers of its own."""

    model: nn.Module
    table: LayerTable
    rule: UpdateRule
    factor_every: int
    steps_taken: int
    _damping: Damping
    _health: Health
    _stacks: list[Stack] | None = None
    _rehearsed: str | None
    _loaded: dict[str, dict[str, Tensor]]
    """State of layers until there are stacks."""
    _shared: frozenset[str] | None = None
    """Of another member's state, the factors that mean the same; None: it is this one's own."""
    _packing: dict[Tensor, Any] | None = None
    """What is being saved, while it is."""
    _snapshot: ModelSnapshot
    _executor: Executor
    _accumulator: Accumulator
    _capture: Capture | None
    _labels: Labels
    _notices: Notices
    _sharding: Sharding | None = None
    _on_one_rank: LocalParameters | None = None
    _unit: float | None = None
    """Of the first gradients, for AdamW's ε (`step.update.unit_of`)."""

    @abstractmethod
    def _statistics_are_due(self, step: int) -> bool:
        """Whether a step takes statistics."""

    @abstractmethod
    def _read_table(self) -> LayerTable:
        """The model's layers."""

    @abstractmethod
    def _build(self) -> list[Stack]:
        """Stacks with the state that was loaded, and the executor of their steps."""

    @abstractmethod
    def _make_accumulator(self) -> Accumulator:
        """One that has seen nothing."""

    @abstractmethod
    def _make_capture(self, example_axis: int | None, seed: int) -> Capture | None:
        """Hooks on the model, if its rule wants to see anything."""

    # --- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:  # type: ignore[override]
        """By parameter and layer, as it is now: ``opt.state[p][layer]["P"]``. A layer's is its first parameter's.

        On a CPU these are the tensors that steps read and write; what a GPU keeps packed is unpacked to be looked at.
        """
        if self._packing is not None:
            return self._packing
        if self._stacks is None:
            return self._by_parameter(self._loaded)
        return self._by_parameter({k: v for stack in self._stacks for k, v in stack.portable().items()})

    @state.setter
    def state(self, given: Any) -> None:
        """Torch's constructor begins with an empty one: there is nothing to set."""

    def _by_parameter(
        self, of_layers: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[Tensor, dict[str, dict[str, Tensor]]]:
        """An entry for every parameter and layer, so that it shows what there will be before the first step."""
        found: dict[Tensor, Any] = defaultdict(dict, {p: {} for group in self.param_groups for p in group["params"]})
        params = self._parameters_by_name()
        for spec in self.table.layers:
            if spec.parameters[0] in params:
                found[params[spec.parameters[0]]][spec.name] = dict(of_layers.get(spec.name, {}))
        return found

    def state_dict(self) -> dict[str, Any]:
        """State keyed by parameter, layer by layer, as plain tensors; loads with ``weights_only=True``.

        What is no parameter's ("engine": steps taken, adaptive damping) is also in the first group, where
        `torch.distributed.checkpoint` keeps it.
        """
        if self._snapshot.changed():
            self.follow_model()
        self.param_groups[0]["engine"] = self._engine()
        begun = self._stacks is not None or bool(self._loaded)
        self._packing = self._by_parameter(self._saved() if begun else self._initial_state())
        try:
            found = super().state_dict()
        finally:
            self._packing = None
        return {**found, "engine": self.param_groups[0]["engine"]}

    def _engine(self) -> dict[str, Any]:
        params = self._parameters_by_name()
        return {
            "member": type(self).__name__,
            "rule": self.rule.name,
            "statistics": dict(self.rule.requirements().factors),
            "shapes": {name: tuple(p.shape) for name, p in params.items()},
            "steps": self.steps_taken,
            "forwards": 0 if self._capture is None else self._capture.forwards,
            "rounds": 0 if self._capture is None else self._capture.rounds,
            "damping": self._damping.state() | {"step": self.steps_taken},
            "unit": self._unit,
            "likelihood": self._labels.recognised,
        }

    def _initial_state(self) -> dict[str, dict[str, Tensor]]:
        """What there is to save before the first step: distributed checkpoints are read into tensors that exist."""
        stacks = self._build()
        self._executor.begin_moments()
        return self._saved_stacks(stacks)

    def _saved(self) -> dict[str, dict[str, Tensor]]:
        if self._stacks is None:
            return self._loaded
        return self._saved_stacks(self._stacks)

    def _saved_stacks(self, stacks: list[Stack]) -> dict[str, dict[str, Tensor]]:
        self._executor.settle()
        if self._sharding is not None:
            from layerwise.optim.sharding.state import StateExchange

            return StateExchange(self._sharding).saved(stacks)
        found: dict[str, dict[str, Tensor]] = {}
        for stack in stacks:
            found.update(stack.saved())
        for layer, beside in self._executor.pending(self.steps_taken).items():
            found[layer] |= beside
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Of another member's state the factors are taken that mean the same; where none
        does, it is refused.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if self._snapshot.changed():
            self.follow_model()
        engine = engine_of(state_dict)
        shared = shared_factors(engine, self.rule, type(self).__name__)
        params = self._parameters_by_name()
        check_shapes(engine, params)
        loaded = renamed_state(state_dict, self.param_groups, self._by_parameter({}))
        self._load_groups(state_dict["param_groups"])
        self._loaded, self._shared = loaded, shared
        for stack in self._stacks or []:
            stack.memory.clear()  # rows and examples of the run that is left
        self._stacks = None
        self._accumulator.forget()
        self.steps_taken = int(engine["steps"])
        self._damping.load_state(engine["damping"])
        self._unit = engine.get("unit")
        if self._capture is not None:
            if self._labels.likelihood == "auto":
                self._labels.recognise(self._capture, engine.get("likelihood"))
            self._capture.ask_again()
            self._capture.forwards = int(engine["forwards"])
            self._capture.rounds = int(engine.get("rounds", engine["forwards"]))
            self._capture.due = self._statistics_are_due(self.steps_taken + 1)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load_groups(self, saved: list[dict[str, Any]]) -> None:
        """As torch does it, but for hooks, which have their turn before and after all; names stay the model's."""
        names = [group["param_names"] for group in self.param_groups]
        hooks = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = (
            OrderedDict(),
            OrderedDict(),
        )
        try:
            super().load_state_dict({"state": {}, "param_groups": saved})
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = hooks
        for group, own in zip(self.param_groups, names, strict=True):
            group["param_names"] = own
            group.update({"betas": tuple(group["betas"])} if "betas" in group else {})

    # --- parameters ----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters that take part from now on, such as layers that were frozen before."""
        super().add_param_group(with_own_rate(self._named(param_group)))
        if "steps_taken" not in self.__dict__:  # the constructor's own
            return
        self._rebuild()

    def follow_model(self) -> None:
        """The model has changed: go on with the model that there is.

        A parameter that was replaced has its successor in its group, without its state unless the module is the same.
        """
        self._snapshot.strangers = None
        params, before = named_parameters(self.model), self._parameters_by_name()
        successors = follow_groups(self.param_groups, params)
        owner, owns = self._snapshot.owners, owners(self.model)
        self._snapshot.owners = owns
        unfrozen = {name for group in self.param_groups for name in group["param_names"]} - {*self.table.shapes}
        if successors is None and not any(name in params and params[name].requires_grad for name in unfrozen):
            return
        for name, p in before.items():
            successor = (successors or {}).get(id(p))
            if successor is not None and successor.shape == p.shape and owner[id(p)] == owns[id(successor)]:
                before[name] = successor  # the same module's, as `load_state_dict(assign=True)` leaves it
        self._rebuild(before)

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        groups = self.param_groups
        return {k: p for group in groups for k, p in zip(group["param_names"], group["params"], strict=True)}

    def _rebuild(self, before: dict[str, nn.Parameter] | None = None) -> None:
        """Read the model anew; layers whose parameters (by their names `before`) are the same keep their state."""
        saved, table, self._shared = self._saved(), self.table, None if self._stacks else self._shared
        self._stacks = self._snapshot.strangers = self._rehearsed = None
        self._accumulator.forget()
        self.table = self._read_table()
        params = named_parameters(self.model)
        names = renamed_layers(table, before or params, self.table, params)
        self._loaded = {names[layer]: state for layer, state in saved.items() if layer in names}
        if self._capture is not None:
            self._capture.look_again(self.table)

    def _named(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group with the names its parameters have in the model."""
        if isinstance(self.model, BareParameters):
            group = in_pairs(group)
            return {**group, "params": self.model.named(group["params"])}
        given = group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        names = {id(p): name for name, p in named_parameters(self.model).items()}
        named = [
            p if isinstance(p, tuple) else (names.get(id(p), f"extra.{place}"), p) for place, p in enumerate(params)
        ]
        return {**group, "params": named}

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.__dict__.items() if k not in MADE_ANEW}
        if self._stacks is not None:
            kept["_shared"] = None
        kept["_loaded"], kept["_capture"] = self._saved(), None
        if (capture := self._capture) is not None:
            kept["_capture"] = (capture.example_axis, capture.seed, capture.forwards, capture.rounds)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_capture" not in state:  # torch's load_state_dict hands over state and parameter groups alone
            self.__dict__["param_groups"] = state["param_groups"]
            return
        recorded = state["_capture"]
        super().__setstate__(with_parts({k: v for k, v in state.items() if k != "_capture"}))
        self._accumulator = self._make_accumulator()
        self._snapshot = ModelSnapshot(self.model)
        self._capture = None
        if recorded is not None:
            self._capture = self._make_capture(recorded[0], recorded[1])
            assert self._capture is not None
            self._capture.forwards, self._capture.rounds = recorded[2:]
            self._capture.due = self._statistics_are_due(self.steps_taken + 1)


def with_parts(state: dict[str, Any]) -> dict[str, Any]:
    """A pickled state; in those of before, what `Labels` and `Notices` have now was the optimizer's own."""
    if "_settings" in state:
        state["_labels"] = Labels(**state.pop("_settings"))
        state["_notices"] = Notices(*(state.pop(name) for name in ("_unseen", "_said_fallen", "_said_none_came")))
    return state


# --- what a loaded state says ------------------------------------------------------------------------------


def engine_of(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is no parameter's: at the top, or in the first group, where distributed checkpoints have it."""
    missing = next((key for key in ("state", "param_groups") if key not in state_dict), None)
    found = None if missing else state_dict.get("engine", state_dict["param_groups"][0].get("engine"))
    if found is None:
        raise InputError(
            describe(
                f"a state without {missing or 'engine'!r}",
                "what state_dict() of an optimizer of lw.optim returns",
                "a torch optimizer's state cannot be loaded here",
            )
        )
    return found


def shared_factors(engine: Mapping[str, Any], rule: UpdateRule, member: str) -> frozenset[str] | None:
    """Factors of another member's state that mean the same here; None where it is the same kind of state."""
    ours = dict(rule.requirements().factors)
    theirs = engine.get("statistics", ours)
    if engine["rule"] == rule.name and theirs == ours:
        return None
    shared = frozenset(side for side, of in ours.items() if theirs.get(side) == of and side in ("P", "Q"))
    if not shared:
        raise InputError(
            describe(
                f"a state of {engine.get('member', engine['rule'])}",
                f"one of {member}, or of a member whose factors mean the same",
                "begin without it, or load it into the optimizer that it came from",
            )
        )
    return shared


def check_shapes(engine: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
    """A state of parameters that had another shape would be dropped, layer by layer."""
    for name, shape in engine.get("shapes", {}).items():
        if name in params and tuple(params[name].shape) != tuple(shape):
            raise InputError(
                describe(
                    f"a state for parameter {name!r} of shape {tuple(shape)}",
                    f"shape {tuple(params[name].shape)}, as the model has it",
                    "load the state of the same model, or begin without it",
                )
            )


def renamed_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layers: Mapping[Tensor, Mapping[str, Any]],
) -> dict[str, dict[str, Tensor]]:
    """The state of layers under their present names; as in torch, parameters are known by their place.

    A model that was wrapped or compiled since has other names for the same layers.
    """
    saved = state_dict["param_groups"]
    params = list(chain.from_iterable(group["params"] for group in groups))
    keys = list(chain.from_iterable(group["params"] for group in saved))
    names = list(chain.from_iterable(group["param_names"] for group in groups))
    before = list(chain.from_iterable(group.get("param_names", ()) for group in saved))
    before = before if len(before) == len(names) else names
    places = {key: place for place, key in enumerate(keys) if place < len(params)}
    found: dict[str, dict[str, Tensor]] = {}
    for key, of_layers in state_dict["state"].items():
        place = places.get(key)
        for number, (layer, tensors) in enumerate(of_layers.items()):
            if place is not None:
                own = list(layers.get(params[place], ()))
                layer = renamed(layer, before[place], names[place], own, number, len(of_layers))
            found[layer] = {k: t.clone() for k, t in tensors.items()}
    return found
