"""Experiments of George, *Deep networks training and generalization: insights from linearization* (2023)."""

PAPER = "George (2023), Deep networks training and generalization: insights from linearization"
