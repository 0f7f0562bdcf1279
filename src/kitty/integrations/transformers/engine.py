"""Decoding over the packed cache: a prompt batch in parts, a decode step from a CUDA graph.

Both are exact. What cannot be captured runs as usual, and the reason is logged once.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kitty.errors import KittyError
from kitty.integrations.transformers.cache import KittyCache
from kitty.integrations.transformers.step import STAND_IN, stepping

logger = logging.getLogger("kitty")
PREFILL_TOKENS = 16384  # of a prompt part: fills a GPU, and bounds what its activations take
# arguments of a forward pass that a captured step can do without, and those that change nothing
_STEP_INPUTS = {"input_ids", "attention_mask", "position_ids", "cache_position", "past_key_values"}
_HARMLESS = {
    "use_cache": (True, None),
    "return_dict": (True, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "inputs_embeds": (None,),
    "labels": (None,),
    "logits_to_keep": (1,),
}


class DecodeEngine:
    """Runs a model over one :class:`KittyCache`: prompts in parts, steps from a CUDA graph.

    ``kitty.enable`` puts one under every ``generate()``; a loop of your own may hold one.

    Args:
        model: a causal model with the ``kitty`` attention (``kitty.enable``).
        cache: with a ``max_length`` for the graph.
        graph: whether to replay decode steps from a CUDA graph where that is possible.
        compile: whether to compile the decode step with ``torch.compile``, which fuses what the
            model leaves to single elementwise kernels; costs a minute once.
        prefill_tokens: most tokens of a prompt part; a batch above it is split by sequences.

    Attributes:
        counters: graph_captures, graph_replays, eager_steps and prefill_parts so far.
        fallback_reason: why the latest step ran without a graph; None if it was replayed, or was
            the one that a graph was captured after.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KittyCache,
        *,
        graph: bool = True,
        compile: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        if prefill_tokens <= 0:
            raise KittyError(
                f"prefill_tokens is {prefill_tokens}, but a part has at least one token: leave it "
                "out, or give a larger number."
            )
        self._owned: KittyCache | None = cache
        self._cache = weakref.ref(cache)
        self.prefill_tokens = prefill_tokens
        self.counters: Counter[str] = Counter(
            graph_captures=0, graph_replays=0, eager_steps=0, prefill_parts=0
        )
        self.fallback_reason: str | None = None
        forward = model.forward
        self._forward = forward.original if isinstance(forward, Forward) else forward
        self._step_forward = (
            torch.compile(self._forward, dynamic=False) if compile else self._forward
        )
        self._model = model
        self._compiles = compile
        self._slides = _slides(model)
        self._obstacle = None if graph else "graphs are switched off"
        self._captured: _CapturedStep | None = None

    @property
    def cache(self) -> KittyCache:
        """The cache that the engine runs over."""
        cache = self._cache()
        assert cache is not None
        return cache

    def disown(self) -> None:
        """Let the cache be freed by its last user, who is another one."""
        self._owned = None

    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        sub_batch: int | None = None,
    ) -> Tensor:
        """Fill the empty cache with prompts.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, T]``, 0 for pads, which stand left; None if there are none.
            sub_batch: sequences of a part; None: as many as ``prefill_tokens`` allows.

        Returns:
            Logits ``[B, V]`` behind the last column.
        """
        positions = None
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        out = self._prompt(
            input_ids,
            attention_mask,
            {"position_ids": positions, "logits_to_keep": 1, "use_cache": True},
            sub_batch,
        )
        return out.logits[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to every sequence.

        Args:
            tokens: int64 ``[B, 1]``.

        Returns:
            Logits ``[B, V]``.
        """
        positions = _to_device(self.cache.real_lengths, tokens.device)[:, None]
        out = self.forward(
            input_ids=tokens,
            position_ids=positions,
            cache_position=None,
            logits_to_keep=1,
            use_cache=True,
        )
        return out.logits[:, -1]

    def forward(self, **inputs: Any) -> Any:
        """A forward pass of the model over the cache; arguments and result are the model's own."""
        input_ids = inputs.get("input_ids")
        if input_ids is None or torch.is_grad_enabled():
            return self._plain(inputs)
        if self.cache.get_seq_length() == 0:
            rest = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
            rest.pop("past_key_values", None)
            return self._prompt(input_ids, inputs.get("attention_mask"), rest, None)
        if input_ids.shape[1] == 1:
            return self._step(inputs)
        return self._plain(inputs)

    def _plain(self, inputs: dict[str, Any]) -> Any:
        return self._forward(**{**inputs, "past_key_values": self.cache})

    def _prompt(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        rest: dict[str, Any],
        sub_batch: int | None,
    ) -> Any:
        """A first call; by parts where it is large and nothing in it spans sequences."""
        batch, length = input_ids.shape
        size = min(batch, sub_batch or max(1, self.prefill_tokens // max(1, length)))
        beyond = _beyond(rest, _HARMLESS) - _STEP_INPUTS
        splittable = "logits_to_keep" in rest and not beyond and not self._slides
        if size >= batch or not splittable:
            return self._plain({"input_ids": input_ids, "attention_mask": attention_mask, **rest})
        with self.cache.filling(batch) as fill:
            outputs = []
            for start in range(0, batch, size):
                rows = slice(start, min(start + size, batch))
                fill(rows)
                part = {k: _rows(v, rows, batch) for k, v in rest.items()}
                part["attention_mask"] = _rows(attention_mask, rows, batch)
                outputs.append(self._plain({"input_ids": input_ids[rows], **part}))
                self.counters["prefill_parts"] += 1
        out = outputs[0]
        out.logits = torch.cat([x.logits for x in outputs])
        out["past_key_values"] = self.cache
        return out

    def _step(self, inputs: dict[str, Any]) -> Any:
        unusual = self._unusual(inputs)
        self.fallback_reason = unusual or self._no_graph(inputs["input_ids"].device)
        if self.fallback_reason is not None:
            _log_once(self.fallback_reason)
            self.counters["eager_steps"] += 1
            if unusual or not self._compiles:
                return self._plain(inputs)
        tokens = inputs["input_ids"]
        column = inputs.get("cache_position")
        if column is None:
            column = _to_device([self.cache.get_seq_length()], tokens.device)
        positions = inputs.get("position_ids")
        positions = column[None, :] if positions is None else positions
        if self.fallback_reason is not None:
            self.cache.count_step()
            with stepping(self._model, self.cache):
                return self._with_cache(_run_step(self._step_forward, tokens, positions, column))
        captured = self._captured
        if captured is None or captured.addresses != self.cache.state.addresses():
            return self._first_step(tokens, positions, column)
        self.cache.count_step()
        if captured.addresses != self.cache.state.addresses():  # the step needed more room
            self._captured = None
            return self._first_step(tokens, positions, column, counted=True)
        self.counters["graph_replays"] += 1
        captured.enter(tokens, positions, column)
        return self._with_cache(captured.replay())

    def _first_step(
        self, tokens: Tensor, positions: Tensor, column: Tensor, *, counted: bool = False
    ) -> Any:
        """Run a step as usual, which compiles what it needs, then capture it for the next ones."""
        self._captured = None
        captured = _CapturedStep(self._step_forward, tokens.shape[0], tokens.device)
        captured.enter(tokens, positions, column)
        self.counters["eager_steps"] += 1
        if not counted:
            self.cache.count_step()
        with stepping(self._model, self.cache):
            out = self._with_cache(captured.run())
        try:
            with stepping(self._model, self.cache):
                captured.capture()
            captured.addresses = self.cache.state.addresses()
        except RuntimeError as error:
            torch.cuda.synchronize(tokens.device)
            self._obstacle = f"the model's step cannot be captured ({_first_line(error)})"
            _log_once(self._obstacle)
        else:
            self._captured = captured
            self.counters["graph_captures"] += 1
        return out

    def _with_cache(self, out: Any) -> Any:
        """The result of a step, with the cache in the place of its stand-in."""
        out["past_key_values"] = self.cache
        return out

    def _unusual(self, inputs: dict[str, Any]) -> str | None:
        """What a call asks for beyond a plain step; None if nothing."""
        if self._slides:
            return "the model has sliding-window layers, whose windows move"
        beyond = _beyond(inputs, _HARMLESS) - _STEP_INPUTS
        if beyond:
            return f"the call asks for {', '.join(sorted(beyond))}"
        if not all(self.cache.real_lengths):
            return "a sequence has no token yet"
        if self.cache.observer is not None:
            return "an observer watches every call"
        mask = inputs.get("attention_mask")
        if mask is not None and (mask.dim() != 2 or not bool(mask[:, -1].all())):
            return "the step's mask holds more than real tokens"
        return None

    def _no_graph(self, device: torch.device) -> str | None:
        """Why a plain step cannot be replayed from a graph; None if it can."""
        if self._obstacle is not None:
            return self._obstacle
        if device.type != "cuda":
            return f"the model runs on {device.type}, and CUDA graphs need a GPU"
        obstacle = self.cache.graph_obstacle()
        if obstacle is None and device != self.cache.device:
            return "the model's layers are on several devices"
        return obstacle


class _CapturedStep:
    """One decode step as a CUDA graph with its input and output tensors."""

    def __init__(self, forward: Callable[..., Any], batch: int, device: torch.device) -> None:
        self.addresses: tuple[int, ...] = ()  # of the cache's memory that the graph reads
        self._forward = forward
        self._tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._graph = torch.cuda.CUDAGraph()
        self._out: Any = None

    def enter(self, tokens: Tensor, positions: Tensor, column: Tensor) -> None:
        """Set the inputs of the next run."""
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        self._column.copy_(column)

    def run(self) -> Any:
        """The model's forward pass on the inputs; the cache has counted the step."""
        return _run_step(self._forward, self._tokens, self._positions, self._column)

    def capture(self) -> None:
        """Record the step; nothing is executed."""
        # torch would take a stream of the current device, and miss what runs on the model's
        stream = torch.cuda.Stream(self._tokens.device)
        with torch.cuda.graph(self._graph, stream=stream):
            self._out = self.run()

    def replay(self) -> Any:
        """Run the recorded step; the result is the caller's to keep."""
        self._graph.replay()
        out = type(self._out)(**self._out)
        out.logits = self._out.logits.clone()
        return out


def _run_step(
    forward: Callable[..., Any], tokens: Tensor, positions: Tensor, column: Tensor
) -> Any:
    """A model's forward pass for one token of every sequence, within ``stepping``."""
    return forward(
        input_ids=tokens,
        attention_mask=None,
        position_ids=positions,
        cache_position=column,
        past_key_values=STAND_IN,
        use_cache=True,
        logits_to_keep=1,
    )


class Forward:
    """Stands in for a model's ``forward``: calls with a :class:`KittyCache` go through an engine.

    An object with the model as a field, no closure, so that a copied model calls itself.
    """

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.model = model
        self.options = options
        before = model.__dict__.get("forward")  # accelerate's, if its hooks are there
        self.before: Callable[..., Any] | None = (
            before.before if isinstance(before, Forward) else before
        )
        self._engine: DecodeEngine | None = None
        self._served: Callable[[], KittyCache | None] = _none

    @property
    def original(self) -> Callable[..., Any]:
        """What the model did before."""
        return self.before or type(self.model).forward.__get__(self.model)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.original  # generate() reads the signature

    def engine(self, cache: KittyCache) -> DecodeEngine:
        """The engine of a cache; the latest one is kept, with its captured step."""
        if self._engine is None or self._served() is not cache:
            self._engine = None  # its graph's memory goes before a new one is captured
            self._engine = DecodeEngine(self.model, cache, **self.options)
            self._engine.disown()
            self._served = weakref.ref(cache, self._forget)
        return self._engine

    def _forget(self, served: Any) -> None:
        """Free the engine, and its graph, of a cache that is gone."""
        if self._served is served:
            self._engine = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        cache = kwargs.get("past_key_values")
        if args or not isinstance(cache, KittyCache):
            # torch.compile follows these calls, but not one through the property ``original``
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(self.model).forward(self.model, *args, **kwargs)
        return self.engine(cache).forward(**kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # graphs are neither copied nor saved
        return {**self.__dict__, "_engine": None, "_served": _none}


def _none() -> None:
    return None


def _to_device(numbers: list[int], device: torch.device) -> Tensor:
    """int64 ``[N]``; the host does not wait for the device."""
    tensor = torch.tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _beyond(inputs: dict[str, Any], harmless: dict[str, tuple[Any, ...]]) -> set[str]:
    """Arguments that are given and are none of the harmless values."""
    return {
        name
        for name, value in inputs.items()
        if value is not None and (isinstance(value, Tensor) or value not in harmless.get(name, ()))
    }


def _rows(value: Any, rows: slice, batch: int) -> Any:
    """The part's rows of an argument that has one for each sequence."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == batch:
        return value[rows]
    return value


def _slides(model: PreTrainedModel) -> bool:
    """Whether a layer attends within a sliding window (or chunks)."""
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types:
        return any(kind != "full_attention" for kind in types)
    return getattr(config, "sliding_window", None) is not None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


_logged: set[str] = set()


def _log_once(reason: str) -> None:
    """Say why steps run without a graph, once a process and reason."""
    if reason not in _logged:
        _logged.add(reason)
        level = logging.WARNING if "cannot be captured" in reason else logging.INFO
        logger.log(level, "Decode steps run without a CUDA graph: %s.", reason)
