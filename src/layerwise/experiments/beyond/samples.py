"""How many samples it takes to find features, by anisotropy and by optimizer: many steps, and the theory of one."""

from layerwise.experiments.beyond.samples_claims import claims
from layerwise.experiments.beyond.samples_figures import figures
from layerwise.experiments.beyond.samples_runs import Config, cells, run
from layerwise.experiments.experiment import Experiment
from layerwise.experiments.zhang2025 import PAPER
from layerwise.studies.feature_learning.members import MEMBERS

EXPERIMENT = Experiment(
    name="samples",
    title="Samples needed to find features, by anisotropy",
    paper=PAPER,
    figure="beyond the paper",
    summary=(
        "How many fresh samples the library's optimizers need until the subspace distance of a linear "
        "representation is 0.3 and stays there, as the condition number κ of the inputs' covariance grows "
        "(log-spaced eigenvalues, mean one), each at the best of its rates over two decades. The need of KFAC, "
        "EKFAC, FOOF and Mahalanobis-spectral descent hardly grows, SGD's nearly as κ; that it is not κ we ascribe "
        "to the distance asked for, which lets directions of the smallest eigenvalues go unlearned. Adam needs "
        "less than SGD; Sign needs more, against expectation. SOAP, which never sees the inputs, grows slowly too "
        "(the second moment of gradients contains Σ), but needs several times KFAC's samples. NGD and LocoProp, "
        "which invert, lie between: up to κ = 10⁴ their needs grow by factors of 10 to 27 and of 7 to 55 on five "
        "seeds, KFAC's by 3 to 5 (why was not examined). A need that the budget does not show counts in claims as "
        "that budget. KFAC itself is "
        "compared with least squares of rank k, which uses samples best. At κ = 1 KFAC is limited by its steps; at "
        "large κ by damping (relative to the product of two factors, it is its root on each) or, with little "
        "damping and small batches, by noise, which the inverse multiplies by 1/λ_min. For one step the lemmas are "
        "solved for n: SGD's correlation is at most 1/√(1 + e²), so beyond some e no number of samples is enough; "
        "KFAC's need grows as 1/(1 − e²), and less with the best λ, φ(c⊥² + noise²)/c₁²."
    ),
    presets={
        "smoke": Config(
            seeds=2,
            conditions=(1.0, 100.0),
            members=("sgd", "kfac"),
            rates=3,
            steps=40,
            dx=12,
            batch=64,
            batches=(32, 64),
            dampings=(1e-4, 1e-8),
            anisotropies=(0.0, 0.9),
            factors=(0.5, 2.0),
            many=10.0,
            trials=3,
            index_dx=40,
            dh=40,
        ),
        "laptop": Config(
            seeds=1,
            conditions=(1.0, 1e2, 1e4),
            members=tuple(name for name in MEMBERS if name != "ngd"),
        ),
        "paper": Config(seeds=3, steps=2000, trials=20),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on one core: smoke four seconds, laptop a minute, paper about seven minutes",
    ranges={"correlation": (1e-6, 1 - 1e-6)},
)
