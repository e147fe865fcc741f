"""Experiments of Zhang et al., *On the concurrence of layer-wise preconditioning methods and provable feature learning*
(ICML 2025).
"""

PAPER = (
    "Zhang, Moniri, Nagwekar, Rahman, Xue, Hassani, Matni: On The Concurrence of Layer-wise Preconditioning Methods "
    "and Provable Feature Learning, ICML 2025, arXiv 2502.01763"
)
