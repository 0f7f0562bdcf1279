"""Tiny random models of every family, prompts, and one way to generate, for the tests here."""

import copy

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

FLUSHES = 41  # tokens that fill at least three pages of 8 behind a sink of 4

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # logits far apart, so that no two greedy runs differ by rounding alone
    "initializer_range": 0.4,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**{**SHAPE, "num_key_value_heads": 2, "hidden_size": 64}),
    "qwen3": Qwen3Config(**GROUPED),
    "mistral": MistralConfig(**GROUPED, sliding_window=20),
    "gemma2": Gemma2Config(
        **GROUPED,
        sliding_window=20,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=None,  # sdpa, the oracle, ignores it
    ),
    "gemma3": Gemma3TextConfig(
        **GROUPED,
        sliding_window=20,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": Phi3Config(**{**SHAPE, "num_key_value_heads": 2, "hidden_size": 64}),
    "gpt-neox": GPTNeoXConfig(**{**SHAPE, "hidden_size": 64}),
}


def make(
    name: str = "llama",
    dtype: torch.dtype = torch.float64,
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """A tiny random model with sdpa (eager attention takes its softmax in fp32 also for fp64)."""
    torch.manual_seed(0)
    config = config or copy.deepcopy(CONFIGS[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()


def prompt(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded random prompts and their mask, ``[B, N]``."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[width - length :] = torch.randint(3, 97, (length,), generator=generator)
    return ids, (ids > 0).long()


def greedy(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **kwargs) -> Tensor:
    kwargs = {"max_new_tokens": FLUSHES, "do_sample": False, **kwargs}
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **kwargs)
