"""What an optimizer says about itself: `print(opt)`, `opt.health()`, and warnings."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from layerwise.layers.table import LayerSpec
from layerwise.optim.choice import Choice, FallenMatrices, Group, fallen_matrices
from layerwise.optim.rule import Context, Health
from layerwise.optim.step.stack import Stack

HEAD = ("layer", "parameters", "form K × O × I", "update")
MOST = 0.5
"""Share of the matrix parameters above which falling back is said."""


def layer_row(spec: LayerSpec, choice: Choice, group: Group) -> tuple[str, str, str, str]:
    """What a layer gets, and why it gets the fallback where it does."""
    reason, rule = choice.why_fallback(spec, group), choice.rule_for(spec, group)
    update = rule.describe(choice.shape_of(rule, spec, group)) + (f"  (fallback: {reason})" if reason else "")
    return spec.name, ", ".join(spec.parameters), " × ".join(map(str, spec.form.shape)), update


def table(first_line: str, rows: Sequence[tuple[str, str, str, str]]) -> str:
    """A line of settings, then one line a layer in columns."""
    shown = [HEAD, *rows]
    widths = [max(len(row[i]) for row in shown) for i in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in shown]
    return "\n".join([first_line, *lines])


def headline(name: str, settings: Mapping[str, Any]) -> str:
    """``KFAC(lr=0.03, …)``; what is None is left out."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in settings.items() if value is not None)})"


def of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's rate, decay and momentum: that of its rule, which may be a pair of betas."""
    names = ("lr", "betas", "momentum", "nesterov", "weight_decay")
    found = {name: group[name] for name in names if name in group}
    hidden = [name for name in ("nesterov",) if not found[name]]
    hidden += ["momentum"] if "betas" in found and not found["momentum"] else []
    return {name: f"{value:g}" if name == "lr" else value for name, value in found.items() if name not in hidden}


def group_lines(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a parameter group, where there are several."""
    if len(groups) == 1:
        return []
    shown = []
    for number, group in enumerate(groups):
        names = [*group["param_names"][:3], *(["…"] if len(group["param_names"]) > 3 else [])]
        own = {**of_group(group), "damping": group["damping"], "update": group["update"]}
        shown.append(f"  group {number}: {headline('', own)[1:-1]}; {', '.join(names)}")
    return shown


def measure(stack: Stack, context: Context, health: Health) -> None:
    """Condition numbers and damping of a stack's layers, as they are now."""
    found = stack.rule.conditions(stack.state, context) if stack.state else None
    if found is None:
        return
    for spec, groups in stack.layers:
        health.condition[spec.name] = float(found[0][groups].max())
        health.damping[spec.name] = float(found[1][groups].max())


# --- warnings, each given once -----------------------------------------------------------------------------


@dataclass
class Notices:
    """What an optimizer has warned of, or has still to look at."""

    unseen: set[str] | None = None
    """Layers of its rule that never had statistics; None: stacks are new, and it is to be found."""
    fallen: bool = False
    """Whether it has said that most matrices fall back; likewise that a backward brought no statistics."""
    none_came: bool = False

    def of_statistics(self, member: str, step: int, own: Sequence[Stack], seen: Collection[str], came: int) -> None:
        """Warn of layers that have a gradient and never had statistics, which get the plain gradient's step; and of a
        backward that reached the output and brought no layer's statistics (`came`: how many), after others did."""
        layers = [each for stack in own for each in zip(stack.specs, stack.active(), strict=True)]
        if self.unseen is None:
            self.unseen = {spec.name for spec, _ in layers}
        self.unseen -= {*seen}
        missing = [spec.name for spec, on in layers if on and spec.name in self.unseen]
        if missing:
            self.unseen -= {*missing}
            self.none_came = True
            warnings.warn(_unseen(missing, len(layers)), UserWarning, stacklevel=3)
        if any(on for _, on in layers) and not came and not self.none_came:
            self.none_came = True
            warnings.warn(_none_came(member, step), UserWarning, stacklevel=3)

    def of_fallback(self, member: str, choice: Choice, stacks: Sequence[Stack], model: nn.Module) -> None:
        """Warn where most matrix parameters get the fallback's update and nobody asked for that."""
        requires = choice.rule.requirements()
        if self.fallen or not requires.matrices_only:
            return
        layers = [(spec, choice.why_fallback(spec, stack.group)) for stack in stacks for spec in stack.specs]
        found = fallen_matrices(layers, model)
        if found.share > MOST:
            self.fallen = True
            by_gradient = not (requires.inputs or requires.outgrads)
            said = _most_fall_back(member, found, choice.fallback.name, by_gradient)
            warnings.warn(said, UserWarning, stacklevel=2)


def _unseen(layers: Sequence[str], total: int) -> str:
    """What is said of layers that are trained without statistics."""
    named = ", ".join([*layers[:4], *(["…"] if len(layers) > 4 else [])])
    return (
        f"{len(layers)} of {total} layers have a gradient but no statistics, and take the step of the plain gradient: "
        f"{named}. The model's forward did not call them with gradients on. With torch.utils.checkpoint, pass "
        "use_reentrant=False; call the model itself, not its parts; or give these layers the fallback's update: "
        f'overrides={{"{layers[0]}": {{"update": "fallback"}}}}.'
    )


def _none_came(member: str, step: int) -> str:
    """What is said where a backward brought no statistics at all."""
    return (
        f"{member}: at step {step} the backward reached the model's output, but no layer's statistics came, and steps "
        "go on with those of earlier batches. Is the loss of another tensor than the model returns, or are layers "
        "called outside of the model's forward? Shampoo, SOAP and Muon need gradients alone."
    )


def _most_fall_back(member: str, fallen: FallenMatrices, fallback: str, by_gradient: bool) -> str:
    """What is said where most matrix parameters do not get the member's own update.

    `by_gradient`: the member looks at nothing but gradients, so that no other could treat more.
    """
    percent = {why: f"{100 * size / max(fallen.total, 1):.0f} %" for why, size in fallen.by_reason.items()}
    reasons = "; ".join(f"{percent[why]} {why} ({fallen.example[why]})" for why in [*fallen.by_reason][:3])
    more = "" if len(percent) <= 3 else f"; and {len(percent) - 3} other reasons"
    others = "" if by_gradient else "Muon, Shampoo and SOAP need no more than gradients and treat every matrix; "
    return (
        f"{100 * fallen.share:.0f} % of the model's matrix parameters, embeddings aside, get the fallback's update "
        f"({fallback}), not that of {member}. Why: {reasons}{more}. print(opt) says it layer by layer; matrices= "
        f"says which matrices a parameter holds; {others}"
        'overrides={"...": {"update": "fallback"}} says that it is meant.'
    )
