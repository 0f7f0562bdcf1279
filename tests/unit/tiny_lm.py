"""A tiny random model with a tokenizer of single characters, for tests of downstream tasks."""

from __future__ import annotations

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer():
    """Every printable character is a token."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *string.printable])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    made.chat_template = TEMPLATE
    return made


def model(dtype=torch.float32):
    """Two layers, logits far apart, so that no two greedy runs differ by rounding alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(string.printable),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.4,
    )
    import kitty.integrations.transformers  # noqa: F401  (registers the attention function)

    made = AutoModelForCausalLM.from_config(config, attn_implementation="kitty")
    return made.to(dtype).eval()


def save(folder):
    """Model and tokenizer in the form of transformers."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
