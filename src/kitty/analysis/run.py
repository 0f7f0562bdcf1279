"""The channel analysis of a whole model over one text, as plain data for a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kitty.analysis.channels import (
    captured_share,
    chance_jaccard,
    channel_mask,
    channel_sensitivity,
    key_pages,
    magnitude_map,
    over_pages,
    queries_of_pages,
    selection_overlap,
    selection_stability,
    top_channels,
)
from kitty.errors import KittyError
from kitty.evaluation.offline import head_dim
from kitty.evaluation.reference import check_text, final_hidden
from kitty.integrations.transformers import SimulatedCache
from kitty.methods import UNQUANTIZED_BITS, Method
from kitty.quant import select_channels

DIGITS = 6  # significant digits of the maps in a record


class ChannelObserver:
    """Cache observer that reduces each layer's queries and keys to the analysis on the spot."""

    def __init__(
        self,
        method: Method,
        map_layer: int,
        layers: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Analyse the choice of ``method``; keep the full maps of layer ``map_layer``."""
        self._method, self._map_layer, self._total = method, map_layer, layers
        self._progress = progress or (lambda done, total: None)
        self.layers: list[dict[str, Any]] = []
        self.maps: dict[str, Any] = {}

    def __call__(
        self,
        layer_idx: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        scaling: float,
    ) -> None:
        """Add one layer: query ``[1, Hq, T, D]``, keys ``[1, H, T, D]``, both after RoPE."""
        method, pages = self._method, key_pages(keys[0], self._method)  # [H, P, G, D]
        sensitivity = channel_sensitivity(query[0], pages, method, scaling)  # [Hq, P', D]
        queries = queries_of_pages(method, query.shape[2])
        channels = select_channels(pages[None], method, layer=layer_idx)[0]  # [H, P, D_boost]
        chosen = channel_mask(channels, pages.shape[-1])  # [H, P, D]
        self.layers.append({"layer": layer_idx, **_layer_summary(chosen, sensitivity)})
        if layer_idx == self._map_layer:
            self.maps = {
                "layer": layer_idx,
                "magnitude": _plain(magnitude_map(pages)),  # [H][P][D]
                "sensitivity": _plain(over_pages(sensitivity, queries)),  # [Hq][D]
                "boosted": channels.tolist(),  # [H][P][D_boost]
            }
        self._progress(len(self.layers), self._total)


def _layer_summary(chosen: Tensor, sensitivity: Tensor) -> dict[str, float]:
    """Means over heads and pages: chosen ``[H, P, D]``, sensitivity ``[Hq, P', D]``."""
    heads, _, head_dim = chosen.shape
    count = int(chosen[0, 0].sum())
    seen = chosen[:, : sensitivity.shape[1]]  # [H, P', D]
    per_head = seen.repeat_interleave(sensitivity.shape[0] // heads, dim=0)  # [Hq, P', D]
    per_group = sensitivity.unflatten(0, (heads, -1)).sum(1)  # [H, P', D], what a KV head serves
    consecutive, first = selection_stability(chosen)
    means = {
        "overlap": selection_overlap(seen, per_group),
        "overlap_query_heads": selection_overlap(per_head, sensitivity),
        "captured": captured_share(seen, per_group),
        "captured_best": captured_share(top_channels(per_group, count), per_group),
        "jaccard_consecutive": consecutive,
        "jaccard_first": first,
    }
    summary = {name: _round(float(values.mean())) for name, values in means.items()}
    summary["overlap_chance"] = _round(count / head_dim)
    summary["jaccard_chance"] = _round(chance_jaccard(count, head_dim))
    return summary


@torch.inference_mode()
def analyze(
    model: Any,
    token_ids: Tensor,
    method: Method,
    *,
    map_layer: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Magnitude, sensitivity, overlap and stability of the key channels of every layer (Figure 2).

    One pass of the 16-bit model over the text. Pages and boosted channels are those that decoding
    with ``method`` would form from that pass's keys.

    Args:
        model: a transformers causal language model with the "kitty" attention.
        token_ids: integers ``[T]``, at least three pages past the sink.
        method: S, G, boost ratio and selection; its bits play no part in the 16-bit pass.
        map_layer: layer whose maps are kept in full; default the middle one.
        progress: called with (layers done, layers in all).

    Returns:
        ``metrics``: means over layers. ``analysis``: ``layers``, one summary per layer, and
        ``maps`` of one layer: ``magnitude`` mean |K| ``[H][P][D]``, ``sensitivity``
        ``[Hq][D]``, ``boosted`` channels ``[H][P][D_boost]``.

    Raises:
        KittyError: the text is too short, the method boosts no channel or every one, or the model
            has no such layer.
    """
    check_text(model, token_ids)
    layers = model.config.get_text_config().num_hidden_layers
    map_layer = layers // 2 if map_layer is None else map_layer
    if not 0 <= map_layer < layers:
        raise KittyError(f"map_layer is {map_layer}, but the model has layers 0 to {layers - 1}.")
    channels = head_dim(model)
    if not 0 < method.num_boosted(channels) < channels:
        raise KittyError(
            f"{method.title} boosts {method.num_boosted(channels)} of {channels} channels, which "
            "leaves no choice to analyse: use a method such as kitty or kitty-pro."
        )
    needed = method.sink + method.rollback + 2 * method.page_size + 1
    if len(token_ids) < needed:
        raise KittyError(
            f"The text has {len(token_ids)} tokens, but the analysis compares two pages that "
            f"queries see quantized: use {needed} tokens or more."
        )
    dense = method.replace(
        name="fp16", key_bits=UNQUANTIZED_BITS, value_bits=UNQUANTIZED_BITS, boost_ratio=0.0
    )
    observer = ChannelObserver(method, map_layer, layers, progress)
    final_hidden(model, token_ids, SimulatedCache(dense, observer=observer))
    if len(observer.layers) != layers or not observer.maps:
        raise KittyError(
            f"Only {len(observer.layers)} of {layers} layers went through the cache: load the "
            'model with attn_implementation="kitty".'
        )
    names = [name for name in observer.layers[0] if name != "layer"]
    metrics = {
        name: _round(sum(layer[name] for layer in observer.layers) / layers) for name in names
    }
    return {"metrics": metrics, "analysis": {"layers": observer.layers, "maps": observer.maps}}


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _plain(values: Tensor) -> list[Any]:
    """Nested lists with a record's number of digits."""
    flat = iter([_round(v) for v in values.flatten().tolist()])

    def build(shape: tuple[int, ...]) -> Any:
        return [build(shape[1:]) for _ in range(shape[0])] if shape else next(flat)

    return build(tuple(values.shape))
