"""`Labels`: whose gradients at the output statistics are of, the loss's own or those of labels of a likelihood."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from layerwise.distributed.processes import Processes
from layerwise.foundations import likelihoods
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.optim.options import known
from layerwise.optim.statistics.accumulate import Sums
from layerwise.optim.statistics.hooks import Capture, Seen

LAWS = ("categorical", "bernoulli")
"""Likelihoods that are recognised by the gradient at the output (`statistics.output`)."""


@dataclass
class Labels:
    """What an optimizer was told of the likelihood, and what it has found out since."""

    estimator: str | None
    """ "empirical" (the loss's own gradients), "sampled" or "exact"; None: as the likelihood has it."""
    likelihood: str | Likelihood | None
    """As it was given."""
    samples: int
    """Labels drawn an example."""
    recognised: str | None = None
    """Where `likelihood` is "auto": one of `LAWS`, or "empirical" where it is neither; None: not seen yet."""

    @property
    def may_draw(self) -> bool:
        """Whether labels are drawn, as far as it is known: before the first batch they may be."""
        unknown = self.likelihood == "auto" and self.recognised is None
        return unknown or self.estimator not in (None, "empirical")

    def law(self) -> Likelihood | None:
        """The likelihood, as far as it is known."""
        name = self.likelihood
        if name == "auto":
            name = self.recognised if self.recognised in LAWS else None
        return None if name is None else likelihoods.resolve(name)

    def decide(self, law: Likelihood | None, outgrads: bool) -> str:
        """The estimator, where nothing else was asked for; empirical, where nobody looks at output gradients."""
        given = self.estimator if outgrads else "empirical"
        self.estimator = given or ("empirical" if law is None else "sampled")
        known("estimator", self.estimator, ("empirical", "sampled", "exact"))
        if self.estimator != "empirical" and law is None:
            raise InputError(
                describe(
                    f"estimator={self.estimator!r} without a likelihood",
                    'likelihood="categorical", "gaussian", "bernoulli" or an object of lw.likelihoods',
                    'pass it, or use estimator="empirical"',
                )
            )
        return self.estimator

    def words(self) -> str | None:
        """The likelihood as it was given, or recognised."""
        if self.likelihood == "auto":
            return f"auto ({self.recognised or 'not seen yet'})"
        given = self.likelihood
        return given if given is None or isinstance(given, str) else type(given).__name__

    def recognise(self, capture: Capture, name: str | None) -> None:
        """Take up what was recognised, now or by who saved a state."""
        law = likelihoods.resolve(name) if name in LAWS else None
        self.estimator = "empirical" if law is None else "sampled"
        capture.likelihood, capture.estimator, self.recognised = law, self.estimator, name
        if name is None and capture.reader is not None:
            capture.reader.seen, capture.reader.settled = None, False

    def read(
        self, member: str, capture: Capture, counts: Seen, seen: Mapping[str, Sums], processes: Processes, sync: bool
    ) -> None:
        """What the backwards since the last step told of the loss; its scale is taken out of their statistics, on the
        device unless the host may `sync`.

        All processes decide alike, by sums over them: one may have seen nothing, where all its labels are ignored.
        """
        reader, empirical, scale = capture.reader, capture.estimator == "empirical", None
        if empirical and self.recognised in LAWS:  # labels could not be drawn
            self.recognised = self.estimator = "empirical"
        if reader is not None:
            reader.check()
            if reader.asks and self.recognised is None:
                device = next(capture.model.parameters()).device
                law, scale = reader.decision(processes.add_up([reader.votes().to(device)])[0], member)
                self.recognise(capture, law)
        if not (seen and empirical and capture.scale_free):
            return
        if scale is None:
            device = next(capture.model.parameters()).device
            energy = torch.zeros((), device=device) if counts.energy is None else counts.energy
            known_here = torch.stack([energy, torch.full_like(energy, counts.tokens)]).double()
            energy, tokens = processes.add_up([known_here])[0]
            if not sync:
                squared = tokens.clamp(min=1) / energy
                squared = torch.where((squared > 0) & (squared < math.inf), squared, 1.0)
                for sums in seen.values():
                    sums.rescale_by(squared)
                return
            scale = (float(energy) / max(float(tokens), 1)) ** 0.5
        if 0 < scale < math.inf:
            for sums in seen.values():
                sums.rescale(1 / scale)
