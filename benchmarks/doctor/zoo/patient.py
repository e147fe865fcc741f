"""`Patient`: a network by hand and what is wrong with it; `ZOO` has all of them."""

from collections.abc import Callable
from dataclasses import dataclass

from doctor.case import Case, seeded


@dataclass(frozen=True)
class Patient:
    """A network and what is wrong with it; `fault` None: nothing."""

    name: str
    fault: str | None
    architecture: str
    make: Callable[[], Case]
    tuned: bool
    """Whether it was looked at while thresholds were chosen, with seeds 0 to 2."""


ZOO: list[Patient] = []


def patient(
    fault: str | None, architecture: str, tuned: bool = True
) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """A function that makes a case is a patient of its name."""

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        ZOO.append(Patient(make.__name__.replace("_", "-"), fault, architecture, make, tuned))
        return make

    return register


def made(one: Patient, seed: int) -> Case:
    """The patient with that seed; torch's own random state is left alone."""
    with seeded(seed):
        return one.make()
