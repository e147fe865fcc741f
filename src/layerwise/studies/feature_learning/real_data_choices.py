"""What can be chosen on real images; known without torch, so that it can be listed and checked at once."""

DATA = ("digits", "mnist")
DAMPED = 0.1
"""Damping of the variant "kfac-damped"; the other members have the small one of their table."""
