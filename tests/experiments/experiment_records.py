"""Records of an experiment without a runner."""


def records(experiment, config, seeds):
    """What the runner would have written, for some seeds of every cell."""
    return [
        {"cell": cell.key, "seed": row.seed, "values": dict(row.values), "series": dict(row.series)}
        for cell in experiment.cells_of(config)
        for row in experiment.run(config, cell, seeds)
    ]
