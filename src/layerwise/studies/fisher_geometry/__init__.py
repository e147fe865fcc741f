"""Approximations of the Fisher matrix of real networks, and what each is good for (George 2023, chapters 3 and 4)."""
