"""The ways to generate that are compared: caches of transformers, and Kitty's decode engine.

All are driven alike: ``prefill`` once, then ``step`` after ``step``, or ``fill`` to stand at a
length without decoding up to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.cache_utils import HQQQuantizedCache, QuantizedCacheConfig, QuantoQuantizedCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kitty.benchmark.latency import PERIOD, LatencyJob
from kitty.benchmark.random_cache import fill_random
from kitty.errors import KittyError
from kitty.integrations.transformers import KittyCache
from kitty.integrations.transformers.enable import kv_shape
from kitty.integrations.transformers.engine import DecodeEngine
from kitty.ops import dispatch
from kitty.pages.accounting import tensor_bytes

GQA_ATTENTION = "sdpa_gqa"
# below torch 2.5 transformers writes into a mask of which all sequences share one memory, unless it
# got one for each
WRITES_TO_ITS_MASK = Version(torch.__version__) < Version("2.5")


class Runner:
    """One implementation at work on one batch.

    Args:
        model: of transformers, with the attention implementation :attr:`attention`.
        job: what is measured.
        batch: sequences.
        max_length: tokens of a sequence at most.

    Attributes:
        attention: the attention function that the model must have.
        length: tokens of each sequence in the cache.
        shrinks: whether ``fill`` can go to fewer tokens than there were.
        fallback_reason: why something runs in a slower way than the implementation's name says.
    """

    attention = "sdpa"
    shrinks = True

    def __init__(self, model: Any, job: LatencyJob, batch: int, max_length: int) -> None:
        self.model = model
        self.job = job
        self.batch = batch
        self.max_length = max_length
        self.length = 0
        self.fallback_reason: str | None = None

    def prefill(self, ids: Tensor) -> Tensor:
        """Logits ``[B, V]`` after prompts int64 ``[B, T]`` without pads."""
        raise NotImplementedError

    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` after one more token each, int64 ``[B, 1]``."""
        raise NotImplementedError

    def fill(self, length: int) -> None:
        """Hold ``length`` random tokens."""
        raise NotImplementedError

    def writes_pages(self, length: int) -> bool:
        """Whether the step at ``length`` cached tokens also quantizes what is full."""
        return False

    def cache_bytes(self) -> dict[str, int]:
        """Bytes that the cache holds, by part."""
        raise NotImplementedError

    def counters(self) -> dict[str, int]:
        """Graph captures and replays, eager steps."""
        return {}

    @property
    def unexpected(self) -> str | None:
        """What fell back although it should not have, where that is an error."""
        return None


class HfDynamic(Runner):
    """The default cache of transformers: grows by ``torch.cat``."""

    def __init__(self, model: Any, job: LatencyJob, batch: int, max_length: int) -> None:
        super().__init__(model, job, batch, max_length)
        self.config = model.config.get_text_config()
        self.cache = self.new_cache()
        self._compiled: Any = None

    def new_cache(self) -> Any:
        """An empty cache."""
        return DynamicCache()

    def prefill(self, ids: Tensor) -> Tensor:
        """See :class:`Runner`."""
        logits = self._forward(self.model, ids, torch.arange(ids.shape[1], device=ids.device))
        self.length = ids.shape[1]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """See :class:`Runner`."""
        position = torch.full((1,), self.length, device=tokens.device)
        logits = self._forward(self._stepper(), tokens, position)
        self.length += 1
        return logits

    def _stepper(self) -> Any:
        if not self.job.compiled:
            return self.model
        if self._compiled is None:
            self._compiled = torch.compile(self.model.forward, dynamic=self._dynamic_shapes())
        return self._compiled

    def _dynamic_shapes(self) -> bool:
        return True

    def _forward(
        self, forward: Any, ids: Tensor, position: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        output = forward(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self.cache,
            cache_position=position,
            position_ids=position[None],
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def fill(self, length: int) -> None:
        """See :class:`Runner`."""
        self.cache = self.new_cache()  # the old one goes first
        for layer in range(self.config.num_hidden_layers):
            self.cache.update(self._random(length), self._random(length), layer)
        self.length = length

    def _random(self, length: int) -> Tensor:
        """Keys or values ``[B, H, length, D]`` of one layer."""
        heads, dim = kv_shape(self.config)
        like = next(self.model.parameters())
        shape = (self.batch, heads, length, dim)
        return torch.empty(shape, dtype=like.dtype, device=like.device).normal_()

    def cache_bytes(self) -> dict[str, int]:
        """See :class:`Runner`."""
        keys, values = self.cache.key_cache, self.cache.value_cache
        return {"keys": held_bytes(keys), "values": held_bytes(values)}


class HfDynamicGqa(HfDynamic):
    """The same with an attention that reads each KV head once for all of its query heads."""

    attention = GQA_ATTENTION


class HfStatic(HfDynamic):
    """The preallocated cache of transformers, each operation launched by itself."""

    def new_cache(self) -> Any:
        """An empty cache of the full length."""
        like = next(self.model.parameters())
        return StaticCache(
            self.config, self.batch, self.max_length, device=like.device, dtype=like.dtype
        )

    def fill(self, length: int) -> None:
        """See :class:`Runner`; the addresses stay."""
        for tensor in (*self.cache.key_cache, *self.cache.value_cache):
            tensor[:, :, :length].normal_()
        self.length = length

    def _forward(
        self, forward: Any, ids: Tensor, position: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        if mask is None and WRITES_TO_ITS_MASK:
            mask = torch.ones(self.batch, self.max_length, dtype=torch.bool, device=ids.device)
        return super()._forward(forward, ids, position, mask)

    def _dynamic_shapes(self) -> bool:
        return False


class HfStaticGraph(HfStatic):
    """The same, the whole step captured once in a CUDA graph and replayed."""

    def __init__(self, model: Any, job: LatencyJob, batch: int, max_length: int) -> None:
        super().__init__(model, job, batch, max_length)
        device = next(model.parameters()).device
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._columns = torch.arange(max_length, device=device)
        self._logits: Tensor | None = None
        self._graph: Any = None
        self._replays = 0
        if job.graph is False or device.type != "cuda":
            self.fallback_reason = (
                "CUDA graphs were switched off" if device.type == "cuda" else "no CUDA device"
            )

    def step(self, tokens: Tensor) -> Tensor:
        """See :class:`Runner`."""
        self._tokens.copy_(tokens)
        self._position.fill_(self.length)
        if self._graph is None and self.fallback_reason is None:
            self._capture()
        if self._graph is None:
            logits = self._static_step()
        else:
            self._graph.replay()
            self._replays += 1
            assert self._logits is not None
            logits = self._logits
        self.length += 1
        return logits

    def _static_step(self) -> Tensor:
        # a mask made here, not by transformers, whose way to it looks at the positions' values
        mask = (self._columns <= self._position).expand(self.batch, 1, 1, -1)
        return self._forward(self._stepper(), self._tokens, self._position, mask)

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):  # writes the step's own token twice
                    self._static_step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._logits = self._static_step()
            self._graph = graph
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # capture is refused in many ways
            self.fallback_reason = f"capture failed: {' '.join(str(error).split())[:200]}"

    def counters(self) -> dict[str, int]:
        """See :class:`Runner`."""
        return {"graph_captures": int(self._graph is not None), "graph_replays": self._replays}


class HfQuantized(HfDynamic):
    """A quantized cache of transformers (its KIVI): 4 bits, 128 tokens in 16 bit."""

    axis = 0

    def new_cache(self) -> Any:
        """An empty cache with the defaults of transformers."""
        like = next(self.model.parameters())
        return self.cache_class()(
            QuantizedCacheConfig(
                nbits=4,
                axis_key=self.axis,
                axis_value=self.axis,
                residual_length=PERIOD,
                compute_dtype=like.dtype,
                device=str(like.device),
            )
        )

    def cache_class(self) -> Any:
        """The class of transformers."""
        raise NotImplementedError

    def writes_pages(self, length: int) -> bool:
        """Every 128th step after the prompt quantizes the whole cache again."""
        return (length - self.job.workload.prompt_tokens) % PERIOD == PERIOD - 1

    def fill(self, length: int) -> None:
        """See :class:`Runner`; as many tokens stay in 16 bit as after decoding to ``length``."""
        cache = self.cache = self.new_cache()
        recent = (length - self.job.workload.prompt_tokens) % PERIOD
        for layer in range(self.config.num_hidden_layers):
            cache.update(self._random(length - recent), self._random(length - recent), layer)
            if recent:
                cache.key_cache[layer] = self._random(recent)
                cache.value_cache[layer] = self._random(recent)
        cache._seen_tokens = self.length = length

    def cache_bytes(self) -> dict[str, int]:
        """See :class:`Runner`."""
        return {
            "keys": held_bytes(self.cache._quantized_key_cache),
            "values": held_bytes(self.cache._quantized_value_cache),
            "buffers": held_bytes([self.cache.key_cache, self.cache.value_cache]),
        }


class HfQuanto(HfQuantized):
    """Through optimum-quanto."""

    def __init__(self, model: Any, job: LatencyJob, batch: int, max_length: int) -> None:
        super().__init__(model, job, batch, max_length)
        self.fallback_reason = prepare_quanto(next(model.parameters()).device)

    def cache_class(self) -> Any:
        """See :class:`HfQuantized`."""
        return QuantoQuantizedCache


class HfHqq(HfQuantized):
    """Through HQQ."""

    axis = 1

    def cache_class(self) -> Any:
        """See :class:`HfQuantized`."""
        from hqq.core.quantize import Quantizer
        from transformers import cache_utils

        # transformers binds the name when it is imported, and Kitty keeps that import lean
        cache_utils.HQQQuantizer = Quantizer
        return HQQQuantizedCache


class KittyEngine(Runner):
    """Kitty's decode engine with a packed or a 16-bit cache."""

    attention = "kitty"
    shrinks = False

    def __init__(self, model: Any, job: LatencyJob, batch: int, max_length: int) -> None:
        super().__init__(model, job, batch, max_length)
        method = job.entry.method
        assert method is not None
        self.cache = KittyCache(method, max_length=max_length)
        graph = job.graph is not False
        self.engine = DecodeEngine(model, self.cache, graph=graph, compile=job.compiled)

    def prefill(self, ids: Tensor) -> Tensor:
        """See :class:`Runner`."""
        logits: Tensor = self.engine.prefill(ids, sub_batch=self.job.sub_batch)
        self.length = ids.shape[1]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """See :class:`Runner`."""
        logits: Tensor = self.engine.step(tokens)
        self.length += 1
        self.fallback_reason = self.engine.fallback_reason
        if "out of memory" in (self.fallback_reason or ""):  # the graph had no room
            raise torch.cuda.OutOfMemoryError(self.fallback_reason)
        return logits

    def fill(self, length: int) -> None:
        """See :class:`Runner`."""
        fill_random(self.cache, length)
        self.length = length

    def writes_pages(self, length: int) -> bool:
        """A page is written by the step after the one that filled it."""
        method = self.cache.method
        return method.quantized and any(
            count(length) != count(length - 1) for count in (method.key_pages, method.value_pages)
        )

    def cache_bytes(self) -> dict[str, int]:
        """See :class:`Runner`."""
        return dataclasses.asdict(self.cache.bytes_held())

    def counters(self) -> dict[str, int]:
        """See :class:`Runner`."""
        return dict(self.engine.counters)

    @property
    def unexpected(self) -> str | None:
        """On a GPU neither a step outside a graph nor a torch reference is expected."""
        if not self.job.device.startswith("cuda"):
            return None
        if dispatch.calls["reference"]:
            return f"{dispatch.calls['reference']} calls ran the torch reference, not the kernel"
        if self.job.graph is not False and self.engine.fallback_reason is not None:
            return f"steps ran outside a CUDA graph: {self.engine.fallback_reason}"
        return None


RUNNERS: dict[str, type[Runner]] = {
    "hf-dynamic": HfDynamic,
    "hf-dynamic-gqa": HfDynamicGqa,
    "hf-static": HfStatic,
    "hf-static-graph": HfStaticGraph,
    "hf-quanto-int4": HfQuanto,
    "hf-hqq-int4": HfHqq,
}


def runner_class(job: LatencyJob) -> type[Runner]:
    """What runs a job's implementation."""
    if job.entry.engine == "kitty":
        return KittyEngine
    return RUNNERS[job.entry.name]


# --- parts of the baselines ----------------------------------------------------------------------


def gqa_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers does through sdpa, but without copies of the KV heads.

    Args:
        query: ``[B, Hq, T, D]``.
        key, value: ``[B, H, N, D]``.

    Returns:
        ``[B, T, Hq, D]`` and None.
    """
    causal = query.shape[2] > 1 and attention_mask is None
    out = F.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def register_gqa() -> None:
    """Make ``attn_implementation="sdpa_gqa"`` known.

    Raises:
        KittyError: this torch's sdpa always needs as many KV heads as query heads.
    """
    if "enable_gqa" not in (F.scaled_dot_product_attention.__doc__ or ""):
        raise KittyError(
            f"Implementation 'hf-dynamic-gqa' needs an sdpa with enable_gqa, which torch "
            f"{torch.__version__} does not have: use torch 2.5 or later."
        )
    AttentionInterface.register(GQA_ATTENTION, gqa_attention)
    AttentionMaskInterface.register(GQA_ATTENTION, sdpa_mask)


def prepare_quanto(device: torch.device) -> str | None:
    """Make sure that quanto can unpack on a device.

    It compiles an extension at its first use; where that fails (no compiler, a torch that its
    sources do not know) the same arithmetic in torch takes the place, and is told.

    Returns:
        What was replaced and why; None where the extension works.
    """
    from optimum.quanto.tensor.packed import PackedTensor

    try:
        torch.ops.quanto.unpack(torch.zeros(8, dtype=torch.uint8, device=device), 4)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # a build fails in many ways
        PackedTensor.unpack = _unpack_in_torch
        return f"quanto's extension was not built ({' '.join(str(error).split())[:160]})"
    return None


def _unpack_in_torch(self: Any) -> Tensor:
    """What quanto's ``unpack`` does: plane after plane of a byte, along the first dimension."""
    bits, packed = self._bits, self._data
    planes = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.cat(planes)[: self.shape[0]]


def held_bytes(value: Any) -> int:
    """Bytes of all tensors in nested lists, dicts and tensor subclasses."""
    return tensor_bytes(list(_plain_tensors(value)))


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _plain_tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _plain_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _plain_tensors(item)
