"""What the patched transformers calls for ``cache_implementation="kitty"``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import GenerationConfig

from kitty.errors import KittyError
from kitty.integrations.transformers.attention import NAME
from kitty.integrations.transformers.cache import KittyCacheBase
from kitty.integrations.transformers.enable import (
    check_mode,
    check_model,
    is_enabled,
    longest,
    new_cache,
    use_engine,
)

ENGINE_SETTINGS = ("graph", "compile", "prefill_tokens")


def native_cache(config: Any, max_length: int | None = 1) -> KittyCacheBase:
    """A cache as a ``KittyCacheConfig`` describes it.

    Args:
        config: has ``method``, ``cache`` and any settings of the method or of ``kitty.enable`` as
            attributes.
        max_length: see :class:`KittyCache`.

    Raises:
        KittyError: the method, the cache or a setting is unknown or out of range.
    """
    settings = {k: v for k, v in vars(config).items() if k not in ENGINE_SETTINGS}
    method, cache = settings.pop("method"), settings.pop("cache")
    return new_cache(method, cache, max_length=max_length, **settings)


def prepare_native(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    assistant_model: PreTrainedModel | None,
    batch_size: int,
    max_cache_length: int,
) -> KittyCacheBase:
    """The cache of one ``generate()``; the model attends through Kitty from then on.

    Args:
        model: that generates.
        generation_config: of the call.
        assistant_model: of assisted decoding, or None.
        batch_size: prompts.
        max_cache_length: tokens that the cache may come to hold, less one.

    Raises:
        KittyError: the model or the decoding mode cannot work with a Kitty cache.
    """
    check_model(model)
    check_mode(generation_config, assistant_model)
    for config in (model.config, model.config.get_text_config()):
        config._attn_implementation = NAME  # equals sdpa wherever there is no Kitty cache
    settings = generation_config.cache_config
    # this copy of the configuration has served; an assistant model would inherit half of it
    generation_config.cache_implementation = generation_config.cache_config = None
    if settings is not None and not hasattr(settings, "method"):
        raise KittyError(
            f'cache_config is a {type(settings).__name__}, but cache_implementation="kitty" '
            'takes a dict such as {"method": "kitty-pro"}.'
        )
    described = settings or SimpleNamespace(method="kitty-pro", cache="packed")
    method = native_cache(described).method
    options = {k: v for k, v in vars(described).items() if k in ENGINE_SETTINGS}
    if options or not is_enabled(model):  # an earlier call's settings end with it
        use_engine(model, **options)
    length = longest(model, method, generation_config, batch_size, max_cache_length)
    return native_cache(described, length)
