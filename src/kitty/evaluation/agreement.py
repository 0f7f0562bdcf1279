"""Whether the simulated and the packed cache give the same greedy answers to a task's problems.

The two compute the same numbers in another order, so answers may part where the model is undecided:
at a step whose two best logits lie closer than the logits of the two caches do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitty.errors import KittyError
from kitty.evaluation.lm import CACHES, KittyLM
from kitty.methods import Method


@dataclass(frozen=True)
class Comparison:
    """One problem with both caches.

    Attributes:
        tokens: length of the prompt, and of the shorter answer.
        parted: step at which the answers first differ; None: they are the same.
        gap: between the two best logits of the simulation at that step; None: they are the same.
        error: largest difference of a logit at the steps with the same tokens before.
        pages_read: quantized pages that the packed cache read.
    """

    tokens: tuple[int, int]
    parted: int | None
    gap: float | None
    error: float
    pages_read: int

    @property
    def explained(self) -> bool:
        """The same answers, or a first difference where the gap is below the logits' error."""
        return self.gap is None or self.gap < self.error


@torch.inference_mode()
def greedy(
    lm: KittyLM, prompt: str, cache: str, new_tokens: int
) -> tuple[Tensor, Tensor, int, int]:
    """Greedy answer to a prompt with one cache.

    Returns:
        Tokens ``[n]``, logits ``[n, vocabulary]``, quantized pages read, tokens of the prompt.
    """
    held = CACHES[cache](lm.method)
    ids, mask = lm.tok_batch_encode([prompt])
    out = lm.model.generate(
        ids.to(lm.device),
        attention_mask=mask.to(lm.device),
        past_key_values=held,
        max_new_tokens=new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=lm.tokenizer.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(out.logits).float().cpu()
    tokens = out.sequences[0, ids.shape[1] :].cpu()
    return tokens, logits, int(held.quantized_pages_read), ids.shape[1]


def compare(lm: KittyLM, prompt: str, new_tokens: int) -> Comparison:
    """One problem with both caches."""
    simulated, expected, _, length = greedy(lm, prompt, "simulate", new_tokens)
    packed, found, read, _ = greedy(lm, prompt, "packed", new_tokens)
    steps = min(len(simulated), len(packed))
    differing = (simulated[:steps] != packed[:steps]).nonzero()
    parted = int(differing[0]) if len(differing) else None
    alike = steps if parted is None else parted + 1  # the logits before a choice are comparable
    error = float((expected[:alike] - found[:alike]).abs().max())
    gap = None
    if parted is not None:
        best = expected[parted].topk(2).values
        gap = float(best[0] - best[1])
    return Comparison((length, steps), parted, gap, error, read)


def compare_task(
    lm: KittyLM,
    loaded: dict[str, Any],
    limit: int,
    new_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Comparison]:
    """The leading problems of a task that was loaded with ``load_lm_task``.

    Raises:
        KittyError: the task asks for likelihoods, or its texts leave no quantized page to read.
    """
    (task,) = loaded["tasks"].values()
    if task.OUTPUT_TYPE != "generate_until":
        raise KittyError(
            f"Task {task.config.task!r} asks for likelihoods, so there are no answers to compare: "
            "use a task that generates."
        )
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    found = []
    for instance in task.instances:
        found.append(compare(lm, instance.args[0], new_tokens))
        progress(len(found), len(task.instances))
    if not all(comparison.pages_read for comparison in found):
        raise KittyError(
            f"A problem of task {task.config.task!r} is too short for method {lm.method.name!r} to "
            "read a quantized page: use more shots or more new tokens."
        )
    return found


def check_method(method: Method) -> None:
    """Refuse a method that has one cache only.

    Raises:
        KittyError: the packed cache cannot hold it.
    """
    if (reason := method.packed_reason()) is not None:
        raise KittyError(
            f"Method {method.name!r} has no packed cache to compare with ({reason}): use kitty, "
            "kitty-pro, kivi-k2v2, kivi-k2v2-sink or kivi-k4v2-sink."
        )
