"""Models of `transformers`, from tiny configurations: the library's own classes, unchanged, with random weights."""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import transformers as hf
from torch import nn

VOCABULARY = 13
WIDTH = 8
SCALE = 0.1
"""Standard deviation of weights: five times the usual one, so that attention is not uniform, and no more: beyond it
float32 itself, in plain autograd, is off by more than 1e-6."""
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "initializer_range": SCALE,
    "use_cache": False,
    **_TOKENS,
}


def gpt2() -> nn.Module:
    """Matrices are `Conv1D` [in, out]; the head is tied to the embedding; positions are an embedding of a range."""
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2, initializer_range=SCALE, **_TOKENS
    )
    return hf.GPT2LMHeadModel(config)


def _bert(**more: Any) -> hf.BertConfig:
    return hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        initializer_range=SCALE,
        **more,
    )


def bert_masked() -> nn.Module:
    """Masked language model, its decoder tied to the embedding, with a bias registered under two names."""
    return hf.BertForMaskedLM(_bert())


def bert_classifier() -> nn.Module:
    """A classifier on the pooled first token."""
    return hf.BertForSequenceClassification(_bert(num_labels=3))


def llama() -> nn.Module:
    """Grouped queries, rotary positions, RMS norms of its own; a head apart."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER, tie_word_embeddings=False))


def llama_tied() -> nn.Module:
    """The same, its head tied to the embedding."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER, tie_word_embeddings=True))


def qwen3() -> nn.Module:
    """Norms of queries and keys inside the attention."""
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=4, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    """Each token is sent to two of three experts, which are stacked in one parameter."""
    config = hf.MixtralConfig(**_DECODER, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=False)
    return hf.MixtralForCausalLM(config)


def mamba() -> nn.Module:
    """Selective state spaces: a depthwise convolution over time and a scan."""
    config = hf.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=3,
        num_hidden_layers=2,
        conv_kernel=3,
        expand=2,
        time_step_rank=2,
        use_cache=False,
        **_TOKENS,
    )
    return hf.MambaForCausalLM(config)


def t5() -> nn.Module:
    """Encoder and decoder with relative positions, which both embed with one matrix."""
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=6,
        relative_attention_max_distance=8,
        initializer_factor=0.5,  # with 1, plain autograd's own gradients lose three times as much in float32
        decoder_start_token_id=0,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    return hf.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    """Convolutions over a spectrogram, an encoder with fixed positions, a decoder with trained ones."""
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=4,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        max_source_positions=6,
        max_target_positions=8,
        init_std=SCALE,
        decoder_start_token_id=1,
        use_cache=False,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_TOKENS,
    )
    return hf.WhisperForConditionalGeneration(config)


def vit() -> nn.Module:
    """A class token and trained positions added to the patches."""
    config = hf.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=4,
        initializer_range=SCALE,
    )
    return hf.ViTForImageClassification(config)


def clip() -> nn.Module:
    """Images against texts; of shared texts the logits of one image depend on no other image."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
        "initializer_range": SCALE,
        "projection_dim": 6,
        **_TOKENS,
    }
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "initializer_range": SCALE,
        "projection_dim": 6,
    }
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=6))


def clip_text() -> nn.Module:
    """The text tower and its projection."""
    return hf.CLIPTextModelWithProjection(clip().config.text_config)
