"""What `benchmarks/shakespeare.py` races: a character model, its optimizers, and single runs."""
