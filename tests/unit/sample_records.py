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
