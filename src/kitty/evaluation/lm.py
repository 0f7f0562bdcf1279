"""lm-eval's model interface over a quantized cache: what a task asks, the method answers.

Generation goes through ``model.generate`` with a Kitty cache, log-likelihoods through one pass in
which every query sees what decoding would show it. Nothing falls back to 16 bit unsaid.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from kitty.errors import KittyError
from kitty.evaluation.journal import Journal, digest
from kitty.evaluation.reference import CHECKED_TOKENS, check_head, head_logits
from kitty.integrations.transformers import KittyCache, SimulatedCache, disable, enable
from kitty.integrations.transformers.cache import KittyCacheBase
from kitty.methods import Method
from kitty.models import enough_memory

CACHES: dict[str, type[KittyCacheBase]] = {"simulate": SimulatedCache, "packed": KittyCache}
ENABLED = {"simulate": "simulated", "packed": "packed"}  # names that kitty.enable uses
MEMORY_REMEDY = (
    "use a smaller --batch-size, fewer new tokens, a smaller dtype or another device; what is "
    "finished is kept"
)

Progress = Callable[[int, int], None]


def batch_seed(seed: int, first: int) -> int:
    """Seed of the batch whose first problem is number ``first``: 32 bits, all that torch uses."""
    return int(digest([seed, first])[:8], 16)


class KittyLM(HFLM):
    """A model with one method's cache, as lm-eval sees it.

    Args:
        model: a transformers causal language model with the "kitty" attention.
        tokenizer: that belongs to it.
        method: any method; ``fp16`` uses transformers' own cache.
        cache: ``simulate`` (any bits) or ``packed``.
        batch_size: problems that are answered together.
        seed: of the sampling; every batch has one of its own made of it.
        journal: keeps the answers, batch by batch.
        progress: called with (answers so far, answers asked for).

    Raises:
        KittyError: the cache is unknown or cannot hold the method.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        method: Method,
        cache: str = "simulate",
        *,
        batch_size: int = 1,
        seed: int = 0,
        journal: Journal | None = None,
        progress: Progress | None = None,
    ) -> None:
        if cache not in CACHES:
            raise KittyError(f"cache is {cache!r}, which is not known: use {' or '.join(CACHES)}.")
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # what it warns of is meant here
        super().__init__(
            pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal"
        )
        self.method = method
        self.cache = cache
        self.seed = seed
        self.journal = journal or Journal(None, "")
        self.progress = progress or (lambda done, total: None)
        self.longest = 0  # tokens of the longest text that went through the model
        self._read = 0
        self._head_is_checked = False
        if method.quantized:
            enable(model, method, cache=ENABLED[cache])  # says early what it cannot hold
        else:
            disable(model)

    def new_cache(self, *, dense_prefill: bool = True) -> KittyCacheBase | None:
        """An empty cache of the method; None where it does not quantize."""
        if not self.method.quantized:
            return None
        return CACHES[self.cache](self.method, dense_prefill=dense_prefill)

    @contextlib.contextmanager
    def _enough_memory(self) -> Iterator[None]:
        name = getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__
        with enough_memory(str(self.device), name, MEMORY_REMEDY):
            yield

    # --- generation ---

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that the model writes, batch by batch; finished ones come from the journal."""

        def run(batch: list[Any]) -> list[str]:
            return HFLM.generate_until(self, batch, disable_tqdm=True)

        self._check_room(requests)
        arguments = [[request.args[0], request.args[1]] for request in requests]
        sizes = [len(self.tok_encode(prompt)) for prompt, _ in arguments]
        return self._in_batches("generate", requests, arguments, sizes, run)

    def _check_room(self, requests: Sequence[Any]) -> None:
        asked = max((r.args[1].get("max_gen_toks", self.max_gen_toks) for r in requests), default=0)
        if asked >= self.max_length:
            raise KittyError(
                f"max_gen_toks is {asked}, but the model has {self.max_length} positions for "
                "prompt and answer together: ask for fewer tokens with --max-gen-toks."
            )

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        cache = self.new_cache()
        if cache is not None:
            generation_kwargs["past_key_values"] = cache
        written: Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self.longest = max(self.longest, written.shape[1])
        if cache is not None:
            self._read += int(cache.quantized_pages_read)
        return written

    # --- log-likelihood ---

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is what greedy decoding writes."""
        arguments = [[context, continuation] for _, context, continuation in requests]
        sizes = [len(context) + len(continuation) for context, continuation in arguments]
        found = self._in_batches("score", list(requests), arguments, sizes, self._score)
        return [(float(value), bool(greedy)) for value, greedy in found]

    @torch.inference_mode()
    def _score(self, batch: list[Any]) -> list[list[Any]]:
        texts = [
            (context + continuation)[-self.max_length - 1 :] for _, context, continuation in batch
        ]
        width = max(len(text) for text in texts) - 1
        self.longest = max(self.longest, width)
        ids = torch.full((len(batch), width), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, width - len(text) + 1 :] = torch.tensor(text[:-1])
            mask[row, width - len(text) + 1 :] = 1
        if not self._head_is_checked:
            check_head(self.model, ids[0, -min(CHECKED_TOKENS, int(mask[0].sum())) :])
            self._head_is_checked = True
        cache = self.new_cache(dense_prefill=False)
        hidden = self.model.base_model(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0).to(self.device),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state  # [B, T, width of the model]
        if cache is not None:
            self._read += int(cache.quantized_pages_read)
        return [
            self._score_row(hidden[row], continuation)
            for row, (_, _, continuation) in enumerate(batch)
        ]

    def _score_row(self, hidden: Tensor, continuation: list[int]) -> list[Any]:
        log_p = head_logits(self.model, hidden[-len(continuation) :]).log_softmax(-1)
        wanted = torch.tensor(continuation, device=log_p.device)
        value = log_p.gather(-1, wanted[:, None]).sum()
        return [float(value), bool((log_p.argmax(-1) == wanted).all())]

    # --- batches ---

    def _in_batches(
        self,
        kind: str,
        requests: list[Any],
        arguments: list[list[Any]],
        sizes: list[int],
        run: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        """Answers in the order of the requests; the longest come first, each batch is kept at once.

        Batches are made of all requests, finished ones too: an answer does not depend on where an
        earlier run was stopped.
        """
        keys = [digest([kind, index, argument]) for index, argument in enumerate(arguments)]
        order = sorted(range(len(requests)), key=lambda i: (-sizes[i], i))
        groups: dict[str, list[int]] = {}
        for i in order:  # one batch has one set of generation arguments
            groups.setdefault(digest(arguments[i][1]) if kind == "generate" else "", []).append(i)
        size = int(self.batch_size)
        known = self.journal.answers
        for group in groups.values():
            for begin in range(0, len(group), size):
                batch = [i for i in group[begin : begin + size] if keys[i] not in known]
                if batch:
                    torch.manual_seed(batch_seed(self.seed, group[begin]))
                    before = self._read
                    with self._enough_memory():
                        answers = run([requests[i] for i in batch])
                    found = {keys[i]: answer for i, answer in zip(batch, answers, strict=True)}
                    self.journal.add(found, self._read - before)
                self.progress(sum(key in known for key in keys), len(keys))
        return [known[key] for key in keys]
