"""What `benchmarks/gpu.py` measures: training as it is (`training`), its start-up (`startup`), and the best case of an
optimizer's step, one batch that is hardly learnt (`best_case`)."""
