"""``kitty.enable`` and ``kitty.disable``: every generate() of a model uses a Kitty cache.

Nothing of transformers is changed; the model instance gets one wrapped method.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig, GenerationMode

from kitty.errors import KittyError
from kitty.integrations.transformers.attention import NAME
from kitty.integrations.transformers.cache import KittyCache, KittyCacheBase, SimulatedCache
from kitty.integrations.transformers.engine import PREFILL_TOKENS, Forward
from kitty.methods import Method, get_method
from kitty.pages import PageLayout

_HOOKED = "_prepare_cache_for_generation"
_FORWARD = "forward"
_SAVED = "_kitty_saved_attention"
RESERVED_SHARE = 0.5  # of the free memory that generate() may reserve for pages up front
CACHES: dict[str, type[KittyCacheBase]] = {"packed": KittyCache, "simulated": SimulatedCache}


def enable(
    model: PreTrainedModel,
    method: str | Method = "kitty-pro",
    *,
    cache: str = "packed",
    graph: bool = True,
    compile: bool = False,
    prefill_tokens: int = PREFILL_TOKENS,
    **overrides: Any,
) -> PreTrainedModel:
    """Let every ``model.generate()`` use a fresh Kitty cache, and accept one that is passed.

    A cache that a call itself asks for (``past_key_values`` or ``cache_implementation``) wins.
    A second ``enable`` replaces the method; :func:`disable` undoes it.

    Args:
        model: a decoder-only model of transformers 4.53.2, or torch.compile's or PEFT's wrapper
            of one.
        method: a name from configs/methods.yaml, or a Method.
        cache: ``packed`` (2-bit pages in memory) or ``simulated`` (any bits, dense).
        graph: on a GPU, whether decode steps are replayed from a CUDA graph; where that is
            impossible they run as usual, and the logger ``kitty`` says why.
        compile: whether ``torch.compile`` fuses the decode step; costs a minute once.
        prefill_tokens: a batch of prompts with more tokens is filled in a few sequences at a time.
        overrides: fields of the method to change, for example ``rollback=16``.

    Returns:
        The same model.

    Raises:
        KittyError: the model cannot work with it, or the method or cache is unknown.
    """
    resolved = get_method(method, **overrides)
    inner = _unwrapped(model)
    # says now, not at the first generate(), what it cannot hold
    new_cache(resolved, cache, max_length=1)
    check_model(inner)
    disable(inner)
    configs = {id(c): c for c in (inner.config, inner.config.get_text_config())}.values()
    inner.__dict__[_SAVED] = [(config, config._attn_implementation) for config in configs]
    for config in configs:
        config._attn_implementation = NAME
    if inner.can_generate():
        inner.__dict__[_HOOKED] = _Hook(inner, resolved, cache)
        use_engine(inner, graph=graph, compile=compile, prefill_tokens=prefill_tokens)
    return model


def is_enabled(model: PreTrainedModel) -> bool:
    """Whether :func:`enable` holds for a model."""
    return _SAVED in model.__dict__


def use_engine(model: PreTrainedModel, **options: Any) -> None:
    """Let a model's calls with a packed cache go through a :class:`DecodeEngine`.

    Args:
        model: a causal model.
        options: of :class:`DecodeEngine`.
    """
    model.__dict__[_FORWARD] = Forward(model, **options)


def new_cache(
    method: str | Method = "kitty-pro",
    cache: str = "packed",
    *,
    max_length: int | None = None,
    **overrides: Any,
) -> KittyCacheBase:
    """An empty cache of a kind: ``packed`` or ``simulated``.

    Args:
        method: a name from configs/methods.yaml, or a Method.
        cache: the kind.
        max_length: see :class:`KittyCache`; a simulated cache needs none.
        overrides: fields of the method to change.

    Raises:
        KittyError: the kind or method is unknown, or the packed cache cannot hold the method.
    """
    if cache not in CACHES:
        raise KittyError(f"cache is {cache!r}, which is not known: use {' or '.join(CACHES)}.")
    resolved = get_method(method, **overrides)
    if CACHES[cache] is KittyCache:
        return KittyCache(resolved, max_length=max_length)
    return CACHES[cache](resolved)


def kv_shape(config: Any) -> tuple[int, int]:
    """KV heads H and channels D of a head, from a model's (text) configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads), int(dim)


def affordable_length(
    model: PreTrainedModel, method: Method, sequences: int, length: int
) -> int | None:
    """``length`` if pages for it may be reserved at once, None if the cache shall rather grow.

    Args:
        model: on its device.
        method: of the cache.
        sequences: beams and returned sequences counted.
        length: longest text that a ``generate()`` may reach, in tokens.

    Raises:
        KittyError: packed pages cannot hold the model's heads.
    """
    if not method.quantized:
        return length  # has no other form
    if model.device.type != "cuda":
        return None
    config = model.config.get_text_config()
    heads, dim = kv_shape(config)
    layout = PageLayout.of(method, dim)
    pages = method.key_pages(length) * layout.key_page_bytes
    pages += method.value_pages(length) * layout.value_page_bytes
    needed = sequences * config.num_hidden_layers * heads * pages
    free = torch.cuda.mem_get_info(model.device)[0]
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return length if needed <= RESERVED_SHARE * free else None


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`enable`; a model that was never enabled stays as it is."""
    state = _unwrapped(model).__dict__
    for config, implementation in state.pop(_SAVED, []):
        config._attn_implementation = implementation
    state.pop(_HOOKED, None)
    if isinstance(state.get(_FORWARD), Forward):
        before = state.pop(_FORWARD).before
        if before is not None:
            state[_FORWARD] = before
    return model


def _unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside what torch.compile or PEFT made of it.

    Raises:
        KittyError: there is none.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise KittyError(
            f"A {type(model).__name__} is no model of transformers: give what from_pretrained() of "
            "AutoModelForCausalLM returns."
        )
    return inner


def check_model(model: PreTrainedModel) -> None:
    """Say in one sentence why a model cannot use a Kitty cache.

    Raises:
        KittyError: it is an encoder-decoder, or its attention takes no registered function.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise KittyError(
            f"{name} is an encoder-decoder model, whose cross-attention cache Kitty does not "
            "quantize: use a decoder-only model."
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise KittyError(
            f"{name} does not call its attention through transformers' AttentionInterface, so a "
            "Kitty cache cannot serve it: use a model that does, such as Llama, Qwen, Mistral, "
            "Gemma or Phi."
        )


class _Hook:
    """Stands in for a model's ``_prepare_cache_for_generation``.

    An object with the model as a field, no closure, so that a copied or pickled model calls itself.
    """

    def __init__(self, model: PreTrainedModel, method: Method, cache: str) -> None:
        self.model = model
        self.method = method
        self.cache = cache

    def __call__(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        assistant_model: PreTrainedModel | None,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        model = self.model
        given = model_kwargs.get("past_key_values")
        if given is None and _wants_kitty(model, generation_config):
            length = longest(model, self.method, generation_config, batch_size, max_cache_length)
            given = new_cache(self.method, self.cache, max_length=length)
            model_kwargs["past_key_values"] = given
        if isinstance(given, KittyCacheBase):
            check_mode(generation_config, assistant_model)
            # a model's own default (Gemma: "hybrid") must not collide with the cache object
            generation_config.cache_implementation = None
        original = getattr(type(model), _HOOKED)
        return original(
            model, generation_config, model_kwargs, assistant_model, batch_size, max_cache_length,
            *args, **kwargs,
        )  # fmt: skip


def longest(
    model: PreTrainedModel,
    method: Method,
    generation_config: GenerationConfig,
    batch_size: int,
    max_cache_length: int,
) -> int | None:
    """What :func:`affordable_length` gives for a ``generate()`` of ``batch_size`` prompts."""
    # transformers copies a prompt for its beams or for its samples, never for both
    copies = max(generation_config.num_beams, generation_config.num_return_sequences)
    return affordable_length(model, method, batch_size * copies, max_cache_length + 1)


def _wants_kitty(model: PreTrainedModel, generation_config: GenerationConfig) -> bool:
    """Whether this generate() left the choice of the cache to the model."""
    asked = generation_config.cache_implementation
    default = getattr(model.generation_config, "cache_implementation", None)
    return generation_config.use_cache is not False and asked in (None, default)


def check_mode(
    generation_config: GenerationConfig, assistant_model: PreTrainedModel | None
) -> None:
    """Say in one sentence which decoding mode a Kitty cache cannot serve.

    Raises:
        KittyError: it is contrastive search.
    """
    mode = generation_config.get_generation_mode(assistant_model)
    if mode == GenerationMode.CONTRASTIVE_SEARCH:
        raise KittyError(
            "Contrastive search re-reads and rewrites the whole cache, which a quantized cache "
            "cannot do: use another decoding mode, or disable Kitty for this model."
        )
