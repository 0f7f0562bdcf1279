"""Small synthetic records with chosen numbers, for tests of records and reports."""

from __future__ import annotations

import hashlib
from typing import Any

from kitty.methods import get_method

ENVIRONMENT = {
    "python": "3.11.2",
    "torch": "2.7.0",
    "transformers": "4.53.2",
    "kitty": "0.1.0",
    "platform": "Linux-x86_64",
    "gpu": None,
}


def quality_record(
    method: str,
    kl: list[float],
    *,
    passage: str = "first",
    model: str = "small",
    nll: float = 2.0,
    top1: float = 0.5,
    repeat: int = 0,
) -> dict[str, Any]:
    """A quality record whose pages of 128 tokens have the given mean KL divergences."""
    mean = sum(kl) / len(kl)
    described = get_method(method)
    return {
        "schema_version": 1,
        "kind": "quality",
        "experiment": "synthetic",
        "command": "kitty eval",
        "model": {"name": model, "source": None, "sha256": None, "dtype": "float32"},
        "method": described.to_dict(),
        "passage": {
            "name": passage,
            "sha256": hashlib.sha256(passage.encode()).hexdigest(),
            "num_tokens": 128 * len(kl) + 1,
            "licence": "PSF-2.0",
        },
        "repeat": repeat,
        "seed": 0,
        "metrics": {
            "nll": nll,
            "nll_ci": [nll - 0.1, nll + 0.1],
            "kl": mean,
            "kl_ci": [min(kl), max(kl)],
            "top1": top1,
            "top1_ci": [top1 - 0.05, top1 + 0.05],
            "attention_error": [0.1, 0.2],
            "effective_bits": sum(described.bits_per_element(64)) / 2,
            "quantized_pages_read": 0 if method == "fp16" else 7,
        },
        "pages": {
            "start": [128 * i for i in range(len(kl))],
            "count": [128] * len(kl),
            "nll": [nll] * len(kl),
            "kl": kl,
            "top1": [top1] * len(kl),
        },
        "environment": dict(ENVIRONMENT),
        "revision": "0123abc",
        "wall_time_s": 1.5,
        "peak_memory_bytes": 1000,
        "created": "2025-01-01T00:00:00+00:00",
    }


def task_record(
    method: str,
    score: float,
    *,
    task: str = "gsm8k_cot_llama",
    metric: str = "exact_match,strict-match",
    model: str = "small",
    repeat: int = 0,
    n: int = 20,
    pages_read: int | None = None,
) -> dict[str, Any]:
    """A task record with one score; quantized methods have read pages unless told otherwise."""
    if pages_read is None:
        pages_read = 0 if method == "fp16" else 9
    common = quality_record(method, [0.1], model=model, repeat=repeat)
    for name in ("passage", "pages", "metrics"):
        del common[name]
    return common | {
        "kind": "task",
        "command": "kitty eval lm",
        "task": {
            "name": task,
            "provider": "standin",
            "data_sha256": "0" * 64,
            "num_fewshot": 2,
            "chat_template": False,
            "limit": n,
            "generation": {"do_sample": False, "max_gen_toks": 64},
            "metric": metric,
        },
        "cache": "simulate",
        "metrics": {metric: {"value": score, "stderr": 0.1, "n": n, "ci": [0.0, 1.0]}},
        "quantized_pages_read": pages_read,
        "samples": {"file": f"r{repeat}.samples.jsonl", "sha256": "0" * 64, "n": n},
    }


def latency_record(
    implementation: str,
    batch: int,
    tokens_per_s: float | None,
    *,
    model: str = "small",
    prompt: int = 100,
    new: int = 8092,
    peak: int = 10**9,
    step_ms: float = 10.0,
    lengths: tuple[int, ...] = (160, 4096, 8184),
) -> dict[str, Any]:
    """A latency record; without ``tokens_per_s`` one that ran out of memory."""
    common = quality_record("fp16", [0.1], model=model)
    for name in ("passage", "pages", "metrics", "method", "repeat", "seed"):
        del common[name]
    ok = tokens_per_s is not None
    steps = {f"step_ms_{name}": step_ms for name in ("p20", "p50", "p80", "last")}
    metrics = {
        "prefill_s": 0.5,
        "decode_s": 100.0,
        "tokens_per_s": tokens_per_s,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": peak,
        **steps,
    }
    samples = [
        {"length": n, "mean_ms": step_ms, "step_ms": [step_ms] * 3, "page_step_ms": []}
        for n in lengths
    ]
    return common | {
        "kind": "latency",
        "command": "kitty bench e2e",
        "implementation": implementation,
        "workload": {"prompt_tokens": prompt, "new_tokens": new, "batch": batch},
        "mode": "sampled",
        "outcome": "ok" if ok else "out_of_memory",
        **({} if ok else {"stage": "cache"}),
        "metrics": metrics if ok else {},
        "cache_bytes": {"key_pages": 600, "buffers": 400} if ok else {},
        "cache_bytes_16bit": 5000,
        "counters": {"dense_fallbacks": 0, "graph_replays": 7},
        "fallback_reason": None,
        "memory_budget_bytes": 80 * 10**9,
        "budget_enforced": True,
        "settings": {"compile": False},
        "samples": samples if ok else [],
    }
