"""decode_attention on a GPU: the interpreter's matrix, random configurations, graphs, memory."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
import decode_cases
from decode_cases import (
    CAPPED,
    CASES,
    CROSSING,
    RANGES,
    Cache,
    DecodeCase,
    assert_within_rule,
    check_decode,
    relative_rms,
)

from kitty.methods import get_method
from kitty.ops.append import append
from kitty.ops.decode_attention import decode_attention
from kitty.ops.decode_attention.kernel import launch_decode
from kitty.ops.decode_attention.reference import decode_attention_reference
from kitty.pages import (
    BufferLayout,
    PageLayout,
    empty_buffers,
    empty_key_pages,
    empty_value_pages,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"


@pytest.mark.parametrize("case", [*CASES, *CROSSING, *RANGES, *CAPPED], ids=str)
def test_attention_is_as_exact_as_plain_16_bit_arithmetic(case: DecodeCase) -> None:
    check_decode(case, DEVICE)


@pytest.mark.parametrize("seed", range(24))
def test_random_configurations_are_within_the_rule(seed: int) -> None:
    draw = random.Random(seed)
    num_tokens = draw.choice([1, 1, 1, 2, 3, 5])
    page_size = draw.choice([128, 128, 256])
    case = DecodeCase(
        head_dim=draw.choice([64, 80, 96, 128, 128, 256]),
        heads=draw.randint(1, 3),
        queries_per_kv=draw.choice([1, 2, 4, 4, 7, 8, 16, 32]),
        num_tokens=num_tokens,
        boost_ratio=draw.choice([0.0, 0.125, 0.25, 0.5, 1.0, draw.random()]),
        dtype=draw.choice([torch.float16, torch.bfloat16]),
        sink=draw.choice([0, 1, 32, draw.randrange(100)]),
        window=draw.choice([0, 128, draw.randrange(300)]),
        rollback=draw.choice([0, 0, draw.randrange(140)]),
        page_size=page_size,
        lengths=tuple(draw.randint(1, 2500) for _ in range(draw.randint(1, 5))),
        num_splits=draw.choice([1, 2, 3, 7, 30]),
        key_range=draw.choice([1.0, 1.0, 20.0]),
        query_range=draw.choice([1.0, 0.1]),
    )
    check_decode(case, DEVICE, seed)


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[11], CASES[15]], ids=str)
def test_inline_assembly_and_plain_operations_give_the_same(case: DecodeCase) -> None:
    """The plain path is what the interpreter runs; both must do the same arithmetic."""
    cache = Cache(case, DEVICE)
    shape = (*cache.query.shape[:3], 2)
    outputs = []
    for overrides in ({}, {"ASM": False, "MOVMATRIX": False}):
        out = torch.full((*shape, case.head_dim), torch.nan, device=DEVICE)
        lse = torch.full(shape, torch.nan, device=DEVICE)
        launch_decode(
            *cache.tensors,
            out,
            lse,
            sink=case.sink,
            window=case.window,
            rollback=case.rollback,
            softmax_scale=case.head_dim**-0.5,
            num_splits=2,
            **overrides,
        )
        outputs.append((out, lse))
    (out, lse), (plain_out, plain_lse) = outputs
    assert relative_rms(out, plain_out.double()) < 2.0**-12
    assert (lse - plain_lse).abs().max() < 1e-4


def test_one_captured_graph_serves_growing_sequences() -> None:
    """Captured at a few tokens, replayed past several pages: append and attention, no host."""
    method = get_method("kitty-pro", window=40)
    batch, heads, queries_per_kv, head_dim, steps = 2, 2, 4, 128, 700
    layout = PageLayout.of(method, head_dim)
    generator = torch.Generator(DEVICE).manual_seed(0)
    k, v = torch.randn(
        2, batch, heads, steps + 8, head_dim, device=DEVICE, generator=generator
    ).half()
    query = torch.randn(
        batch, heads * queries_per_kv, 1, head_dim, device=DEVICE, generator=generator
    ).half()
    table = torch.randperm(12, device=DEVICE, generator=generator).to(torch.int32).view(2, 6)
    keys = empty_key_pages(layout, 12, heads, DEVICE)
    values = empty_value_pages(layout, 12, heads, DEVICE)
    buffers = empty_buffers(BufferLayout.of(method, head_dim), batch, heads, torch.half, DEVICE)
    new_k, new_v = (torch.zeros_like(x[:, :, :1]) for x in (k, v))
    seq_lens, paged = torch.zeros(2, batch, dtype=torch.int32, device=DEVICE)
    num_new = torch.zeros(batch, dtype=torch.int32, device=DEVICE)

    def step() -> torch.Tensor:
        append(
            new_k, new_v, keys, values, table, table, buffers, seq_lens, paged, method,
            num_new=num_new,
        )  # fmt: skip
        return decode_attention(query, keys, values, table, table, buffers, seq_lens, method)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    num_new.fill_(1)
    for at in range(steps):
        # the second sequence starts 8 tokens later
        for b, index in enumerate((at, at - 8)):
            num_new[b] = int(index >= 0)
            new_k[b], new_v[b] = k[b, :, max(index, 0), None], v[b, :, max(index, 0), None]
        seq_lens += num_new
        graph.replay()
        if at in (9, 31, 200, 330, 500, steps - 1):
            options = {
                "sink": method.sink,
                "window": method.window,
                "rollback": method.rollback,
                "softmax_scale": head_dim**-0.5,
            }
            tensors = (query, keys, values, table, table, buffers, seq_lens)
            exact, _ = decode_attention_reference(
                *tensors, **options, compute=torch.float64, decoded=torch.float64
            )
            plain, _ = decode_attention_reference(*tensors, **options, compute=torch.half)
            assert_within_rule(out, plain, exact)
        torch.maximum(paged, seq_lens - num_new, out=paged)


def test_pages_behind_two_to_the_31_elements_are_read_where_they_are() -> None:
    cache = Cache(DecodeCase(lengths=(430,), heads=1, num_tokens=1), DEVICE)
    want, _ = cache.run()
    far = 2**31 // (16 * 64) + 7
    for pages in ("keys", "values"):
        near = getattr(cache, pages)
        moved = [
            torch.empty((far + part.shape[0], *part.shape[1:]), dtype=part.dtype, device=DEVICE)
            for part in near
        ]
        for part, source in zip(moved, near, strict=True):
            part[far:] = source
        setattr(cache, pages, type(near)(*moved))
    cache.key_table = torch.where(cache.key_table >= 0, cache.key_table + far, -1)
    cache.value_table = torch.where(cache.value_table >= 0, cache.value_table + far, -1)
    assert torch.equal(cache.run()[0], want)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
def test_memcheck_finds_nothing_in_a_small_run() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(decode_cases.__file__).parent)!r})\n"
        "from decode_cases import *\n"
        "for case in (CASES[1], CASES[3], CASES[14]):\n"
        "    check_decode(case, 'cuda')\n"
    )
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(
        ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9",
         sys.executable, "-c", program],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
