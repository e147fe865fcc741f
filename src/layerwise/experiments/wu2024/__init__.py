"""Experiments of Wu, *Theoretical understanding of neural network optimization landscape and self-supervised
representation learning* (2023).
"""

PAPER = (
    "Wu (2023), Theoretical understanding of neural network optimization landscape and self-supervised "
    "representation learning"
)
