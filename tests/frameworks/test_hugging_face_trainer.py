"""`transformers.Trainer`: its hook for optimizers that take the model, schedules, clipping, evaluation, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from framework_training import FROM_GRADIENTS, MEMBERS, SHORT, member

import layerwise as lw
from layerwise.foundations.errors import UnsupportedError

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'layerwise[frameworks]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'layerwise[frameworks]'")

STEPS, CLIP, RATE = 9, 0.5, 0.02
ROWS = torch.randint(17, (4 * 2 * STEPS, 8), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


def decoder() -> Any:
    """Of two blocks, its table of embeddings tied to the head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=17,
                hidden_size=12,
                intermediate_size=20,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=16,
                tie_word_embeddings=True,
            )
        )


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    """One that takes the rows in order."""

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(DATA)

    of_trainer = {k: options.pop(k) for k in ("optimizer_cls_and_kwargs", "optimizers") if k in options}
    args = transformers.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "max_steps": STEPS,
            "learning_rate": RATE,
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
            "max_grad_norm": CLIP,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **options,
        },
    )
    return InOrder(model, args, train_dataset=DATA, eval_dataset=DATA[:8], **of_trainer)


def factory(name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """As the recipe has it: what is not an optimizer's class is called for a function of the model."""
    return lambda: member(name), {"lr": RATE, **options}


def plain_loop(name: str, accumulate: int = 1) -> Any:
    model = decoder().train()
    opt = member(name)(model, lr=RATE)
    schedule = transformers.get_scheduler("linear", opt, 2, STEPS)
    for step in range(STEPS * accumulate):
        rows = ROWS[4 * step : 4 * step + 4]
        found = model(input_ids=rows, labels=rows)
        (found.loss / accumulate).backward()
        if (step + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            opt.step()
            schedule.step()
            opt.zero_grad()
    return model


def distance(a: Any, b: Any) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in MEMBERS]
)
def test_factory_evaluation_and_a_checkpoint_within_a_cycle(name: str, tmp_path: Path):
    expected = plain_loop(name)
    assert distance(expected, decoder()) > 1e-3
    model = decoder()
    often = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    trainer(model, tmp_path, optimizer_cls_and_kwargs=factory(name), **often).train()
    assert distance(model, expected) == 0.0
    resumed = decoder()
    again = trainer(resumed, tmp_path, optimizer_cls_and_kwargs=factory(name), **often)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert distance(resumed, expected) == 0.0


def test_gradient_accumulation(tmp_path: Path):
    """The Trainer weighs every batch by its share of tokens; they are equal here, so that it is the mean."""
    model = decoder()
    more = {"gradient_accumulation_steps": 2}
    trainer(model, tmp_path, optimizer_cls_and_kwargs=factory("KFAC"), **more).train()
    assert distance(model, plain_loop("KFAC", accumulate=2)) < 1e-5


def test_bfloat16_and_gradient_checkpointing(tmp_path: Path):
    options = {"bf16": True, "gradient_checkpointing": True}
    found = trainer(decoder(), tmp_path, optimizer_cls_and_kwargs=factory("KFAC"), **options)
    found.train()
    assert found.optimizer.optimizer.steps_taken == STEPS
    assert found.evaluate()["eval_loss"] < 2.9  # log 17 = 2.83 is the loss of a guess


@pytest.mark.parametrize("name", FROM_GRADIENTS)
def test_a_class_gets_groups_with_and_without_decay(name: str, tmp_path: Path):
    """What `optimizer_cls_and_kwargs` does with a class of torch: two groups of parameters, without the model."""
    cls = getattr(lw.optim, name)
    found = trainer(decoder(), tmp_path, optimizer_cls_and_kwargs=(cls, {"lr": RATE}), weight_decay=0.1)
    found.train()
    assert [group["weight_decay"] for group in found.optimizer.param_groups] == [0.1, 0.0]
    assert found.optimizer.optimizer.steps_taken == STEPS


def test_a_class_that_needs_the_model_says_so(tmp_path: Path, untyped: None):
    found = trainer(decoder(), tmp_path, optimizer_cls_and_kwargs=(lw.optim.KFAC, {"lr": RATE}))
    with pytest.raises(UnsupportedError, match="Pass the model"):
        found.train()


def test_optimizer_and_schedule_of_ones_own(tmp_path: Path):
    model = decoder()
    opt = member("KFAC")(model, lr=RATE)
    trainer(model, tmp_path, optimizers=(opt, transformers.get_scheduler("linear", opt, 2, STEPS))).train()
    assert distance(model, plain_loop("KFAC")) == 0.0
