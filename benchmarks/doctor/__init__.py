"""What `benchmarks/doctor.py` tries `lw.doctor` on.

Networks with planted faults: written down one by one (`zoo`), and drawn at random (`drawn`). Short runs of optimizers
(`ranking`), and a transformer on the clock (`cost`).
"""
