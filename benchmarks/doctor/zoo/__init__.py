"""Networks that were written down one by one, each made from a seed: `ZOO`.

Those with ``tuned=True`` were looked at while the doctor's thresholds were chosen (with seeds 0 to 2); the others were
written down afterwards.
"""

from doctor.zoo import data_faults, healthy, signal_faults, training_faults
from doctor.zoo.patient import ZOO as ZOO
from doctor.zoo.patient import Patient as Patient
from doctor.zoo.patient import made as made

PARTS = (healthy, data_faults, signal_faults, training_faults)
"""Modules whose patients `ZOO` has."""
