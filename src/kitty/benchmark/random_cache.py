"""A packed cache brought to any length with random content, so that a step there can be timed."""

from __future__ import annotations

import torch

from kitty.integrations.transformers import KittyCache


def fill_random(cache: KittyCache, length: int) -> None:
    """Let every sequence hold ``length`` tokens, with valid random pages and 16-bit tokens.

    Args:
        cache: after a first call, with room for ``length`` tokens.
        length: tokens of each sequence.

    Raises:
        KittyError: the cache is empty or longer already, or its pool is exhausted.
    """
    cache.pretend(length)
    pool = cache.state.pool
    for index, layer in enumerate(cache.state.layers):
        keys, values = pool.keys.storage(index), pool.values.storage(index)
        for words in (keys.words, keys.high, values.words):
            words.random_(-(2**15), 2**15)
        for meta in (keys.meta, values.meta):
            meta[:, :, 0].uniform_(0.1, 1.0)
            meta[:, :, 1].normal_()
        dim, boosted = keys.words.shape[-1], keys.boosted.shape[-1]
        channels = torch.randperm(dim, device=keys.boosted.device)[:boosted]
        keys.boosted.copy_(channels.sort().values.to(torch.uint8))
        for buffer in layer.buffers or ():
            buffer.normal_()
