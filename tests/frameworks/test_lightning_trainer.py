"""Lightning: `step(closure)` of automatic optimization, manual optimization, checkpoints within a refresh cycle."""

from pathlib import Path
from typing import Any

import pytest
from framework_training import (
    BATCH,
    CLIP,
    MEMBERS,
    SHORT,
    assert_has_moved,
    assert_same_weights,
    batch,
    data,
    loss_of,
    member,
    net,
    plain_loop,
    warmup,
)
from torch.utils.data import DataLoader, TensorDataset

L = pytest.importorskip("lightning", reason="needs lightning: pip install 'layerwise[frameworks]'")

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*dataloader' does not have many workers",
    "ignore:You are trying to `self.log`",
    "ignore:.*is not a registered submodule",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
STEPS = 8


class Classifier(L.LightningModule):
    """As in the recipe. It takes the batch of its own step, since a resumed run begins its data anew."""

    def __init__(self, name: str, automatic: bool = True, whole: bool = False) -> None:
        super().__init__()
        self.net, self.name, self.whole = net(), name, whole
        self.automatic_optimization = automatic

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, _: Any, step: int) -> Any:
        loss = loss_of(self if self.whole else self.net, batch(self.global_step, STEPS))
        if not self.automatic_optimization:
            opt, schedule = self.optimizers(), self.lr_schedulers()
            self.manual_backward(loss)
            self.clip_gradients(opt, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            opt.step()
            opt.zero_grad()
            schedule.step()
        return loss

    def validation_step(self, found: Any, step: int) -> None:
        self.log("loss", loss_of(self.net, found))

    def configure_optimizers(self) -> Any:
        opt = member(self.name)(self if self.whole else self.net)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": warmup(opt), "interval": "step"}}


def fit(module: Any, checkpoint: Path | None = None, resume: bool = False, **options: Any) -> Any:
    loader = DataLoader(TensorDataset(*data(STEPS)), batch_size=BATCH)
    clip = {"gradient_clip_val": CLIP} if module.automatic_optimization else {}
    saving = checkpoint is not None and not resume
    callbacks = [L.pytorch.callbacks.ModelCheckpoint(checkpoint, every_n_train_steps=3, save_top_k=-1)] * saving
    trainer = L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": STEPS,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": saving,
            "callbacks": callbacks,
            "val_check_interval": 2,
            **clip,
            **options,
        }
    )
    where = next(checkpoint.glob("*step=3.ckpt")) if checkpoint is not None and resume else None
    trainer.fit(module, loader, loader, ckpt_path=where)
    return trainer


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in MEMBERS]
)
def test_automatic_manual_and_resumed(name: str, tmp_path: Path):
    """Validation every second step; the checkpoint is of step 3, a refresh is due at steps 1, 5, …"""
    expected = plain_loop(member(name), STEPS)
    assert_has_moved(expected)
    automatic = Classifier(name)
    fit(automatic, tmp_path)
    assert_same_weights(automatic.net, expected)
    manual = Classifier(name, automatic=False)
    fit(manual)
    assert_same_weights(manual.net, expected)
    resumed = Classifier(name)
    fit(resumed, tmp_path, resume=True)
    assert_same_weights(resumed.net, expected)


def test_the_module_itself_as_the_model():
    """Where training_step calls `self(x)`."""
    module = Classifier("KFAC", whole=True)
    fit(module)
    assert_same_weights(module.net, plain_loop(member("KFAC"), STEPS))


def test_gradient_accumulation_and_bfloat16():
    module = Classifier("KFAC")
    trainer = fit(module, accumulate_grad_batches=2, precision="bf16-mixed", max_steps=4)
    assert trainer.optimizers[0].steps_taken == 4
    assert_has_moved(module.net)
