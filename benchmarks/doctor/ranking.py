"""Whether the order of optimizers by predicted decrease is that of short runs, each at the best of six rates."""

import copy
import math
import statistics
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import layerwise as lw
from doctor.case import Case
from doctor.zoo import ZOO, made

RANKED = ("healthy-mlp", "healthy-regression", "healthy-trained", "fresh-gelu", "fresh-conv1d")
"""Networks on which optimizers are compared."""
STEPS: tuple[int, ...] = (10, 40)
"""Lengths of the runs."""
RATES = {"SGD": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)}
OTHER_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BATCH = 128


def ranking(seeds: Sequence[int], names: Sequence[str] = RANKED) -> dict:
    """Spearman's correlation of predicted decreases with those of runs, each at the best of six rates."""
    found = []
    for name in names:
        one = next(patient for patient in ZOO if patient.name == name)
        for seed in seeds:
            case = made(one, seed)
            report = lw.doctor(case.model, case.data, case.likelihood, seconds=600)
            predicted = {step.name: step.predicted for step in report.measured.steps}
            one_step = {step.name: step.measured or 0.0 for step in report.measured.steps}
            row = {"network": name, "seed": seed, "members": len(predicted)}
            runs = {member: best_runs(case, member) for member in predicted}
            for steps in STEPS:
                ends = {member: run[steps] for member, run in runs.items()}
                decreases = {member: report.measured.loss - end for member, end in ends.items()}
                row[f"predicted_{steps}"] = spearman(predicted, decreases)
                row[f"measured_step_{steps}"] = spearman(one_step, decreases)
                row[f"best_{steps}"] = min(ends, key=lambda member: ends[member])
                chosen = max(predicted, key=lambda member: predicted[member])
                order = sorted(ends, key=lambda member: ends[member])
                row[f"place_of_choice_{steps}"] = order.index(chosen) + 1
            found.append(row)
            shown = ", ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print(shown, flush=True)
    summary = {}
    for key in [f"{what}_{steps}" for steps in STEPS for what in ("predicted", "measured_step", "place_of_choice")]:
        values = [row[key] for row in found]
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
        summary[key] = [round(statistics.mean(values), 3), round(spread, 3)]
        print(f"{key:24s} mean {statistics.mean(values):.2f} ± {spread:.2f} over {len(values)} networks")
    return {"summary": summary, "runs": found}


def best_runs(case: Case, member: str) -> dict[int, float]:
    """The loss after so many steps, each at the best of the rates."""
    runs = [run(case, member, rate) for rate in RATES.get(member, OTHER_RATES)]
    return {steps: min(one[steps] for one in runs) for steps in STEPS}


def run(case: Case, member: str, rate: float) -> dict[int, float]:
    """The loss on all data after some steps on batches; infinite where it is not finite."""
    model, (x, y) = copy.deepcopy(case.model).train(), case.data
    values = y.is_floating_point()
    law = {"likelihood": "gaussian" if values else "categorical"} if member in ("KFAC", "EKFAC") else {}
    found = dict.fromkeys(STEPS, math.inf)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        return 0.5 * (f - y).square().sum(-1).mean() if values else F.cross_entropy(f, y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = getattr(lw.optim, member)(model, lr=rate, weight_decay=0.0, **law)
        order = torch.Generator().manual_seed(0)
        for step in range(1, max(STEPS) + 1):
            rows = torch.randint(len(x), (BATCH,), generator=order)
            opt.zero_grad()
            value = loss(x[rows], y[rows])
            if not math.isfinite(value.item()):
                break
            value.backward()
            opt.step()
            if step in STEPS:
                with torch.no_grad():
                    end = loss(x, y).item()
                found[step] = end if math.isfinite(end) else math.inf
    return found


def spearman(first: dict[str, float], second: dict[str, float]) -> float:
    """Correlation of ranks; ties, of which there are none but among diverged runs, in any order."""
    ranks = [torch.tensor([values[key] for key in first]).argsort().argsort().double() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
