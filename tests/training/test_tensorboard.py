"""TensorBoard: an option; without the package, a clear word."""

import sys

import pytest

from layerwise.training.recorder import Recorder
from layerwise.training.tensorboard import TensorBoard


def test_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'layerwise\[tensorboard\]'"):
        TensorBoard(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_event_files(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'layerwise[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path) as sink:
        recorder = Recorder(sinks=[sink])
        for step in (0, 5):
            recorder.add(step, {"test/loss": 1.0 / (step + 1)})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("test/loss")] == [(0, 1.0), (5, pytest.approx(1 / 6))]
