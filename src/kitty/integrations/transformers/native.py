"""What the patched transformers calls for ``cache_implementation="kitty"``."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.generation import GenerationConfig

from kitty.errors import KittyError
from kitty.integrations.transformers.attention import NAME
from kitty.integrations.transformers.cache import KittyCacheBase
from kitty.integrations.transformers.enable import check_mode, check_model, new_cache


def native_cache(config: Any) -> KittyCacheBase:
    """A cache as a ``KittyCacheConfig`` describes it.

    Args:
        config: has ``method``, ``cache`` and any settings of the method as attributes.

    Raises:
        KittyError: the method, the cache or a setting is unknown or out of range.
    """
    settings = dict(vars(config))
    return new_cache(settings.pop("method"), settings.pop("cache"), **settings)


def prepare_native(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    assistant_model: PreTrainedModel | None = None,
) -> KittyCacheBase:
    """The cache of one ``generate()``; the model attends through Kitty from then on.

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
    if settings is None:
        return new_cache()
    if not hasattr(settings, "method"):
        raise KittyError(
            f'cache_config is a {type(settings).__name__}, but cache_implementation="kitty" '
            'takes a dict such as {"method": "kitty-pro"}.'
        )
    return native_cache(settings)
