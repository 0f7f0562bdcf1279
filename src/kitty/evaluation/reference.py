"""The 16-bit pass that every method is compared with, and logits from its final hidden states.

Hidden states are small (tokens × width); logits (tokens × vocabulary) are recomputed in chunks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kitty.errors import KittyError
from kitty.records import write_atomically

CHECKED_TOKENS = 8
LOGIT_ELEMENTS = 1 << 24  # logits held at a time: 64 MiB in fp32


@dataclass(frozen=True)
class Reference:
    """Final hidden states of the unquantized model over one text.

    Attributes:
        token_ids: int64 ``[T]``.
        hidden: ``[T, width]`` after the final norm, in the model's dtype.
        fingerprint: of the model's weights, see :func:`model_fingerprint`.
    """

    token_ids: Tensor
    hidden: Tensor
    fingerprint: str

    def save(self, path: Path) -> None:
        """Write atomically as safetensors."""
        tensors = {"hidden": self.hidden.cpu().contiguous(), "token_ids": self.token_ids.cpu()}
        metadata = {"fingerprint": self.fingerprint}
        write_atomically(path, safetensors.torch.save(tensors, metadata))

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Read what :meth:`save` wrote.

        Raises:
            KittyError: the file is missing or damaged.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                hidden, ids = file.get_tensor("hidden"), file.get_tensor("token_ids")
            if hidden.dim() != 2 or ids.shape != hidden.shape[:1]:
                raise TypeError("hidden states and token ids do not belong together")
            return cls(ids, hidden, metadata["fingerprint"])
        except (OSError, safetensors.SafetensorError, KeyError, TypeError) as error:
            raise KittyError(
                f"The reference pass {path} is missing or damaged: delete it and run the same "
                "command again."
            ) from error

    def check(self, model: Any, token_ids: Tensor) -> None:
        """Refuse a reference of another text or another model.

        Raises:
            KittyError: token ids or weights differ.
        """
        if not torch.equal(self.token_ids, token_ids.cpu()):
            raise KittyError(
                f"The reference pass is of another text ({len(self.token_ids)} tokens, this text "
                f"has {len(token_ids)}): write a reference for this text."
            )
        if self.fingerprint != model_fingerprint(model):
            raise KittyError(
                "The reference pass is of another model or dtype: write one with this model."
            )


def model_fingerprint(model: Any) -> str:
    """Short sha256 over each parameter's name, shape, dtype and first 64 elements."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        head = parameter.detach().flatten()[:64].to(device="cpu", dtype=torch.float64)
        digest.update(head.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_text(model: Any, token_ids: Tensor) -> None:
    """Refuse token ids that are no single text, or that the model has no words or positions for.

    Raises:
        KittyError: the shape is not ``[T]`` with T at least 1, T exceeds the model's positions, or
            an id exceeds its vocabulary.
    """
    if token_ids.dim() != 1 or token_ids.dtype not in (torch.int32, torch.int64):
        raise KittyError(
            f"token_ids has shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}, but one "
            "text is evaluated at a time: give a vector of int64."
        )
    if len(token_ids) == 0:
        raise KittyError("The text has no token: give a longer one.")
    words = model.get_input_embeddings().weight.shape[0]
    low, high = (int(x) for x in token_ids.aminmax())
    if low < 0 or high >= words:
        raise KittyError(
            f"The text has token id {low if low < 0 else high}, but the model's vocabulary is 0 to "
            f"{words - 1}: use the tokenizer that belongs to the model."
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and len(token_ids) > limit:
        raise KittyError(
            f"The text has {len(token_ids)} tokens, but the model has {limit} positions: use at "
            f"most {limit} tokens."
        )


def final_hidden(model: Any, token_ids: Tensor, cache: Any = None) -> Tensor:
    """Final hidden states ``[T, width]`` of one forward pass over the whole text.

    Args:
        model: a transformers causal language model.
        token_ids: int64 ``[T]``.
        cache: a transformers cache to fill; None for a pass without one.
    """
    ids = token_ids.to(model.device)[None]  # [1, T]
    output = model.base_model(input_ids=ids, past_key_values=cache, use_cache=cache is not None)
    return output.last_hidden_state[0]


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits ``[n, vocabulary]``, fp32 or for fp64 models fp64, of hidden states ``[n, width]``.

    Follows the output heads of transformers: a linear layer, then Cohere's ``logit_scale``,
    Granite's ``logits_scaling`` or Gemma's ``final_logit_softcapping`` where the config has them.
    """
    head = model.get_output_embeddings()
    logits = head(hidden.to(head.weight.device))
    config = model.config.get_text_config()
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.inference_mode()
def check_head(model: Any, token_ids: Tensor) -> None:
    """Compare recomputed logits with the model's own on the first tokens.

    Raises:
        KittyError: they differ by more than the rounding of the model's dtype.
    """
    prefix = token_ids[:CHECKED_TOKENS]
    own = model(input_ids=prefix.to(model.device)[None], use_cache=False).logits[0]
    own = own.to(torch.float64)
    recomputed = head_logits(model, final_hidden(model, prefix)).to(own)
    eps = torch.finfo(model.dtype).eps
    error = float((own - recomputed).abs().max() / own.abs().max())
    if not error <= 32 * eps:
        raise KittyError(
            f"The output head of {type(model).__name__} does something to its logits that is not "
            f"known here (relative error {error:.1e} on {len(prefix)} tokens): evaluate a model "
            "whose logits are a linear map of its final hidden states, scaled or soft-capped."
        )


@torch.inference_mode()
def write_reference(model: Any, token_ids: Tensor, path: str | Path) -> Reference:
    """Run the unquantized model over a text with dense attention and save its hidden states.

    Args:
        model: a transformers causal language model; no Kitty cache is used.
        token_ids: integers ``[T]``.
        path: safetensors file, written atomically.

    Raises:
        KittyError: the text does not fit the model, the output head is not understood, or the
            file cannot be written.
    """
    check_text(model, token_ids)
    check_head(model, token_ids)
    reference = Reference(
        token_ids.to(device="cpu", dtype=torch.int64),
        final_hidden(model, token_ids),
        model_fingerprint(model),
    )
    reference.save(Path(path))
    return reference
