"""Teacher-forced quality of a method over a long text, in one vectorized pass.

Every query sees what decoding from the first token would show it: its own page and the local window
in 16 bit, the history quantized (the cache's form for calls that are not a dense prefill).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kitty.cache.packed import TORCH_GROUPS_HEADS
from kitty.errors import KittyError
from kitty.evaluation.bootstrap import RESAMPLES, Pages, bootstrap
from kitty.evaluation.reference import (
    LOGIT_ELEMENTS,
    Reference,
    check_text,
    final_hidden,
    head_logits,
)
from kitty.integrations.transformers import SimulatedCache
from kitty.methods import UNQUANTIZED_BITS, Method

PAGE_TOKENS = 128
ATTENTION = "kitty"

Progress = Callable[[int, int], None]  # steps done, steps in all


class TokenScores(NamedTuple):
    """Scores of each predicted token, fp64 ``[n]``.

    Attributes:
        nll: negative log likelihood of the text's next token, nats.
        kl: KL(16-bit || method) of the next-token distributions, nats.
        top1: 1 where both have the same most likely next token, else 0.
        nll_reference: negative log likelihood under the 16-bit model, nats.
    """

    nll: Tensor
    kl: Tensor
    top1: Tensor
    nll_reference: Tensor


def token_scores(logits: Tensor, reference_logits: Tensor, targets: Tensor) -> TokenScores:
    """Compare two next-token distributions per token.

    Args:
        logits: ``[n, vocabulary]`` of the method, fp32 or fp64.
        reference_logits: the same of the 16-bit model.
        targets: int64 ``[n]``, the token that follows in the text.
    """
    q = functional.log_softmax(logits, dim=-1)
    p = functional.log_softmax(reference_logits, dim=-1)
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))  # 0 · log 0 = 0
    at_target = targets[:, None]
    return TokenScores(
        nll=-q.gather(-1, at_target)[:, 0].double(),
        kl=terms.sum(-1).double(),
        top1=(q.argmax(-1) == p.argmax(-1)).double(),
        nll_reference=-p.gather(-1, at_target)[:, 0].double(),
    )


@torch.inference_mode()
def score_hidden(
    model: Any,
    hidden: Tensor,
    reference: Reference,
    progress: Callable[[int], None] = lambda done: None,
) -> TokenScores:
    """Scores of all predicted tokens from final hidden states, a chunk of logits at a time.

    Args:
        model: for its output head.
        hidden: ``[T, width]`` of the method's pass.
        reference: the 16-bit pass over the same text.
        progress: called with the number of chunks done.

    Returns:
        fp64 ``[T - 1]`` each, on the CPU: the last token has no next one.
    """
    predicted = len(reference.token_ids) - 1
    chunk = chunk_tokens(model)
    parts = []
    for step, start in enumerate(range(0, predicted, chunk)):
        at = slice(start, min(start + chunk, predicted))
        logits = head_logits(model, hidden[at])
        expected = head_logits(model, reference.hidden[at])
        targets = reference.token_ids[at.start + 1 : at.stop + 1].to(logits.device)
        parts.append(TokenScores(*(s.cpu() for s in token_scores(logits, expected, targets))))
        progress(step + 1)
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def chunk_tokens(model: Any) -> int:
    """Tokens whose logits are held at a time."""
    return max(1, LOGIT_ELEMENTS // model.get_output_embeddings().weight.shape[0])


def exact_attention(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Causal attention in the dtype of its inputs: ``[B, Hq, T, D]``.

    Args:
        query: ``[B, Hq, T, D]``.
        keys: ``[B, H, T, D]``.
        values: like the keys.
        scaling: of the scores.
        window: tokens that a sliding-window layer sees, own token included; None for all.
    """
    mask = None
    if window is not None and window < query.shape[-2]:
        places = torch.arange(query.shape[-2], device=query.device)
        behind = places[:, None] - places  # [T, T]
        mask = (behind >= 0) & (behind < window)
    options: dict[str, Any] = {}
    if (groups := query.shape[1] // keys.shape[1]) > 1:
        if TORCH_GROUPS_HEADS:
            options["enable_gqa"] = True
        else:
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, **options
    )


class AttentionError:
    """Observer that measures each layer's attention output against exact attention.

    Both use the queries, keys and values of the method's own pass, so a layer's figure holds the
    error made in that layer and none that came from below.
    """

    def __init__(self, model: Any, progress: Callable[[int], None] = lambda done: None) -> None:
        """Measure on ``model``; ``progress`` is called with the number of layers done."""
        self._config = model.config.get_text_config()
        self._progress = progress
        self._squares: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        layer_idx: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        scaling: float,
    ) -> None:
        """Add a layer: query and output ``[B, Hq, T, D]``, unquantized K and V ``[B, H, T, D]``."""
        exact = exact_attention(query, keys, values, scaling, layer_window(self._config, layer_idx))
        error = (output.double() - exact.double()).square().sum()
        self._squares[layer_idx] = error, exact.double().square().sum()
        self._progress(len(self._squares))

    def relative_rms(self) -> list[float]:
        """RMS of the error over RMS of the exact output, per layer."""
        return [
            float((error / exact).sqrt()) for _, (error, exact) in sorted(self._squares.items())
        ]


def layer_window(config: Any, layer: int) -> int | None:
    """Tokens that a layer's attention sees, None for all, from a transformers config."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return window if kinds[layer] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def stored_bits(method: Method, head_dim: int, num_tokens: int) -> dict[str, float]:
    """Stored bits per cached element: in the limit of full pages, and at one length.

    The length's figure adds the 16-bit buffers at their capacity (paper section 4.3): S + G + r
    tokens of keys and S + R + G + r of values.
    """
    key, value = method.bits_per_element(head_dim)
    kept = method.sink + method.page_size + method.rollback
    held = 0.0
    for bits, pages, buffer in (
        (key, method.key_pages(num_tokens), kept),
        (value, method.value_pages(num_tokens), kept + method.window),
    ):
        in_16_bit = num_tokens if bits == UNQUANTIZED_BITS else buffer
        held += pages * method.page_size * bits + in_16_bit * UNQUANTIZED_BITS
    return {
        "effective_bits": (key + value) / 2,
        "effective_bits_keys": key,
        "effective_bits_values": value,
        "effective_bits_at_length": held / (2 * num_tokens),
    }


def page_means(scores: TokenScores, page_tokens: int) -> dict[str, list[Any]]:
    """Means over pages of predicted tokens; a last page under half joins the one before.

    Returns:
        Lists of equal length: ``start`` (index of the first predicting token), ``count``, and the
        means ``nll``, ``kl``, ``top1``, ``nll_reference``.
    """
    length = len(scores.nll)
    starts = list(range(0, length, page_tokens))
    if len(starts) > 1 and 2 * (length - starts[-1]) < page_tokens:
        starts.pop()
    counts = [end - start for start, end in zip(starts, [*starts[1:], length], strict=True)]
    columns = {
        name: [float(part.mean()) for part in values.split(counts)]
        for name, values in scores._asdict().items()
    }
    return {"start": starts, "count": counts, **columns}


def summarize(
    pages: dict[str, list[Any]], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Token means of the page columns with their bootstrap intervals (``_ci``, 95%)."""
    metrics: dict[str, Any] = {}
    for name in TokenScores._fields:
        passage = Pages(pages[name], pages["count"])
        interval = bootstrap([passage], resamples=resamples, seed=seed)
        metrics[name] = interval.mean
        if name != "nll_reference":
            metrics[f"{name}_ci"] = [interval.low, interval.high]
    return metrics


def tokens_needed(method: Method, page_tokens: int = PAGE_TOKENS) -> int:
    """Fewest tokens that give two pages of scores and read quantized keys and values."""
    least = 2 * page_tokens + 1
    if method.quantized:
        least = max(least, method.sink + method.window + method.rollback + method.page_size + 1)
    return least


@torch.inference_mode()
def evaluate_offline(
    model: Any,
    token_ids: Tensor,
    method: Method,
    reference: Reference,
    *,
    page_tokens: int = PAGE_TOKENS,
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Quality of a method against the 16-bit model on one text, every token predicted.

    One forward pass over the text with the simulated cache; all positions from the first are
    scored, those before the first quantized page included.

    Args:
        model: a transformers causal language model with the "kitty" attention.
        token_ids: integers ``[T]``.
        method: any method; ``fp16`` gives the comparison's noise floor.
        reference: of the same model and text, from :func:`write_reference`.
        page_tokens: predicted tokens per bootstrap page, the same for all methods compared.
        resamples: draws of the bootstrap.
        seed: of the bootstrap.
        progress: called with (steps done, steps in all).

    Returns:
        ``metrics``: nll, kl, top1 with ``_ci`` bounds, nll_reference, attention_error per layer,
        effective_bits (…_keys, _values, _at_length), quantized_pages_read. ``pages``: start, count
        and page means. Plain numbers and lists, ready for a record.

    Raises:
        KittyError: the text is too short or too long, the reference is of another text or model,
            or the model does not use the "kitty" attention.
    """
    check_text(model, token_ids)
    _check_length(token_ids, method, page_tokens)
    _check_attention(model)
    reference.check(model, token_ids)

    layers = model.config.get_text_config().num_hidden_layers
    steps = layers - (1 - len(token_ids)) // chunk_tokens(model)
    report = progress or (lambda done, total: None)
    observer = AttentionError(model, lambda done: report(done, steps))
    cache = SimulatedCache(method, dense_prefill=False, observer=observer)
    hidden = final_hidden(model, token_ids, cache)
    read = int(cache.quantized_pages_read)
    if method.quantized != (read > 0):
        raise KittyError(
            f"Method {method.name} read {read} quantized pages over {len(token_ids)} tokens: the "
            "model's attention layers do not go through the cache, so use one that is supported."
        )
    scores = score_hidden(model, hidden, reference, lambda done: report(layers + done, steps))
    pages = page_means(scores, page_tokens)
    metrics = summarize(pages, resamples=resamples, seed=seed)
    metrics["attention_error"] = observer.relative_rms()
    metrics.update(stored_bits(method, head_dim(model), len(token_ids)))
    metrics["quantized_pages_read"] = read
    return {"metrics": metrics, "pages": pages}


def head_dim(model: Any) -> int:
    """Channels of one attention head."""
    config = model.config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_length(token_ids: Tensor, method: Method, page_tokens: int) -> None:
    if page_tokens < 1:
        raise KittyError(f"page_tokens is {page_tokens}, but a page holds at least 1 token.")
    needed = tokens_needed(method, page_tokens)
    if len(token_ids) < needed:
        raise KittyError(
            f"The text has {len(token_ids)} tokens, but {method.title} is scored on {needed} or "
            f"more: two pages of {page_tokens} predicted tokens, and past the first quantized "
            "page; use a longer text."
        )


def _check_attention(model: Any) -> None:
    used = model.config.get_text_config()._attn_implementation
    if used != ATTENTION:
        raise KittyError(
            f"The model uses the {used!r} attention, which cannot read a Kitty cache: load it with "
            f'attn_implementation="{ATTENTION}" or call kitty.enable(model).'
        )
