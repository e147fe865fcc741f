"""Models of Table B.2 of Wu (2023), GPT-2 and OPT, from what is on this machine: how they are measured and judged."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.over_seeds import POSITIVE, bound, combined, ratio

SOURCE = "Table B.2"
PRINTED = {
    "gpt2": (625.8, 665.2),
    "gpt2-medium": (0.7647, 0.3005),
    "gpt2-large": (0.7296, 0.0740),
    "gpt2-xl": (0.7716, 0.0648),
    "facebook/opt-125m": (0.6688, 0.0443),
    "facebook/opt-350m": (2.2449, 0.7587),
    "facebook/opt-1.3b": (0.5234, 0.0402),
}
"""MSE at k = 0 and k = 100."""
NEAR = ("gpt2-large", "gpt2-xl", "facebook/opt-125m", "facebook/opt-1.3b")
"""Models of the main text's comparison, Table 3.1."""
LARGE_K = (0, 10, 100, 1000, 10_000)


def measured(name: str, device: str) -> tuple[dict[str, Any], Sequence[int]]:
    """Values by name, and the numbers k that they are of: the first quarter of WikiText-2's test part."""
    from layerwise.selfsup import anchors
    from layerwise.selfsup.anchors import language_model
    from layerwise.selfsup.anchors.corpus import token_ids
    from layerwise.studies.anchor_vectors import check as study
    from layerwise.studies.anchor_vectors.text import read

    model = language_model.load(name).to(device)
    ids = token_ids(read("test"), language_model.load_tokenizer(name), language_model.open_model(model).vocabulary)
    assert ids is not None, "text gives ids"
    k = tuple(each for each in LARGE_K if 2 * each < language_model.open_model(model).dictionary.words)
    report = anchors(model, ids, k=k, positions=len(ids) // 4, n_anchors=2)
    values: dict[str, Any] = {
        "perplexity": report.perplexity,
        "verdict": report.verdict(max(each for each in k if each <= 100)),
    }
    for kind, rows in {"trained": report.rows, **report.controls}.items():
        for row in rows.values():
            values |= {f"{kind}/{key}@{row.k}": x for key, x in study.numbers(row).items()}
            if row.several:
                values[f"{kind}/two anchors@{row.k}"] = row.several.mse
    return values, k


def claims_of(name: str) -> list[Claim]:
    """Of one that the thesis has; never run by us, for want of its weights."""
    if name not in PRINTED:
        return []
    paper: dict[str, Any] = {"origin": "paper", "source": SOURCE, "note": "Not run by us: no weights were at hand."}
    found = []
    if name in NEAR:
        for k, printed in zip((0, 100), PRINTED[name], strict=True):
            text = f"{name}, k = {k}: the error is the printed one to 15 %."
            limits = (0.85 * printed, 1.15 * printed)
            found.append(bound(name, f"trained/mse@{k}", "within", limits, text, span=POSITIVE, **paper))
    if name == "gpt2":
        text = "gpt2, k = 100: one anchor has a large error, …"
        found.append(bound(name, "trained/mse@100", ">=", 100, text, span=POSITIVE, **paper))
        text = "… and with the better of two for each position it is less than a hundredth of that (ratio)."
        quantity = ratio(name, "trained/two anchors@100", "trained/mse@100")
        paper["note"] += " How small is our reading of “each of which can be well approximated”."
        found.append(Claim(name=f"{name}/two", statement=text, quantity=quantity, relation="<=", target=0.01, **paper))
        return found
    quantity = combined(name, [f"trained/mse@{k}" for k in LARGE_K], lambda *mse: min(a / b for a, b in pairwise(mse)))
    text = f"{name}: the error falls with k (least ratio of neighbours)."
    return [*found, Claim(name=f"{name}/falls", statement=text, quantity=quantity, relation=">", target=1, **paper)]
