"""Networks drawn at random, each with one fault drawn at random: sets that no threshold of `lw.doctor` has seen."""

from doctor.drawn.sets import Drawn as Drawn
from doctor.drawn.sets import drawn as drawn
