"""One training loop: problem × optimizer × budget, with measurements on a schedule."""

from layerwise.training.loop import Trained as Trained
from layerwise.training.loop import train as train
from layerwise.training.metrics import State as State
from layerwise.training.metrics import accuracy as accuracy
from layerwise.training.problem import Budget as Budget
from layerwise.training.problem import Problem as Problem
from layerwise.training.problem import tensor_batches as tensor_batches
from layerwise.training.recorder import Recorder as Recorder
from layerwise.training.schedule import At as At
from layerwise.training.schedule import Every as Every
from layerwise.training.schedule import Logarithmic as Logarithmic
from layerwise.training.search import Choice as Choice
from layerwise.training.search import Method as Method
from layerwise.training.search import search as search
from layerwise.training.trials import Trial as Trial
