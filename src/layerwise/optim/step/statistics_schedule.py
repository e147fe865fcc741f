"""When statistics are taken: every so many steps, but more often at first, while everything they say changes fast.

After t steps they are at most t/8 steps apart: at each of the first 16, then at 18, 20, 22, 24, 27, …. With statistics
every ten steps from the start K-FAC divides steps 2 to 10 by the second moments of an untrained model, and losses
rise as soon as the learning rate is not small (decision 29).
"""

from functools import cache

SHARE = 8
"""Statistics are at most step/SHARE steps apart."""


def is_due(step: int, every: int, growing: bool) -> bool:
    """Whether a step, counted from 1, takes statistics; `growing`: more often at first.

    >>> [step for step in range(1, 30) if is_due(step, 4, growing=True)][12:]
    [13, 14, 15, 16, 18, 20, 22, 24, 27]
    >>> [step for step in range(1, 13) if is_due(step, 4, growing=False)]
    [1, 5, 9]
    """
    early = _early(every, growing)
    return step in early if step <= early[-1] else (step - early[-1]) % every == 0


@cache
def _early(every: int, growing: bool) -> tuple[int, ...]:
    """The steps with statistics until these are `every` steps apart, and the first one after that."""
    found = [1]
    while growing and max(1, found[-1] // SHARE) < every:
        found.append(found[-1] + max(1, found[-1] // SHARE))
    return tuple(found)
