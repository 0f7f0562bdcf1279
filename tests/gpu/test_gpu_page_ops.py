"""append, quantize_pages and dequantize_pages on a GPU: exact bytes, CUDA graphs, memory, speed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
import page_cases
from page_cases import CASES, LAYER, Case, check_append, check_dequantize, check_quantize_pages

from kitty.methods import get_method
from kitty.ops.append import append
from kitty.ops.append.kernel import launch_append
from kitty.ops.quantize_pages import quantize_pages
from kitty.ops.quantize_pages.kernel import launch_quantize_pages
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
MEBIBYTE = 2**20


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_write_the_bytes_of_the_reference(case: Case) -> None:
    check_quantize_pages(case, DEVICE)
    check_append(case, DEVICE)
    for dtype in (torch.float16, torch.bfloat16):
        check_dequantize(case, DEVICE, dtype)


@pytest.mark.parametrize("seed", range(25))
def test_random_configurations_give_the_bytes_of_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    head_dim = draw.choice([64, 80, 96, 128, 256])
    case = Case(
        head_dim=head_dim,
        boost_ratio=draw.choice([0.0, 0.125, 0.25, 0.5, 1.0, draw.random()]),
        # the variance is no exact sum: channels of equal variance may be ordered by rounding
        selection=draw.choice(["magnitude", "random", "rotary"]),
        dtype=draw.choice([torch.float16, torch.bfloat16]),
        sink=draw.choice([0, 1, 32, draw.randrange(100)]),
        window=draw.choice([0, 128, draw.randrange(200)]),
        rollback=draw.choice([0, draw.randrange(140)]),
        page_size=draw.choice([128, 256]),
        heads=draw.randint(1, 5),
        lengths=tuple(draw.randint(1, 1500) for _ in range(draw.randint(1, 4))),
    )
    check_quantize_pages(case, DEVICE)
    calls = tuple(draw.choice([1, 2, draw.randint(1, 300)]) for _ in range(5))
    check_append(case, DEVICE, calls)
    check_dequantize(case, DEVICE, case.dtype)


def test_pages_behind_two_to_the_31_elements_are_addressed() -> None:
    page_cases.check_far_pages(DEVICE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_gpu_of_their_tensors() -> None:
    with torch.cuda.device(0):
        check_quantize_pages(Case(), "cuda:1")
        check_append(Case(), "cuda:1")
        check_dequantize(Case(), "cuda:1", torch.float16)


def test_variance_selects_as_the_reference_on_ordinary_keys() -> None:
    check_quantize_pages(Case(head_dim=128, selection="variance", special=False), DEVICE)


def _layer(batch: int, heads: int, num_pages: int, method_name: str = "kitty-pro") -> tuple:
    method = get_method(method_name)
    layout = PageLayout.of(method, 128)
    table = torch.arange(num_pages, dtype=torch.int32, device=DEVICE).view(batch, -1)
    keys = empty_key_pages(layout, num_pages, heads, DEVICE)
    values = empty_value_pages(layout, num_pages, heads, DEVICE)
    buffers = empty_buffers(BufferLayout.of(method, 128), batch, heads, torch.float16, DEVICE)
    return method, keys, values, table, buffers


def _plain_arguments(method) -> dict:
    return {
        "sink": method.sink,
        "window": method.window,
        "rollback": method.rollback,
        "selection": method.selection,
        "seed": method.seed,
        "layer": LAYER,
    }


def test_one_captured_graph_serves_a_growing_sequence_past_two_flushes() -> None:
    case = Case(head_dim=64, heads=2, lengths=(290, 270), sink=3, window=7)
    k, v = page_cases.random_tokens(case, DEVICE)
    method = case.method
    table, count = page_cases.shuffled_table(case, DEVICE)
    keys, values = page_cases.storage(case, count, DEVICE)
    buffers = empty_buffers(BufferLayout.of(method, 64), 2, 2, case.dtype, DEVICE)
    page_cases.poisoned(buffers)
    new_k, new_v = (torch.zeros_like(x[:, :, :1]) for x in (k, v))
    seq_lens, paged = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    num_new = torch.zeros(2, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        append(
            new_k, new_v, keys, values, table, table, buffers, seq_lens, paged, method,
            num_new=num_new, layer=LAYER,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for at in range(291):
        for b, length in enumerate(case.lengths):
            num_new[b] = int(at < length)
            if at < length:
                new_k[b], new_v[b] = k[b, :, at : at + 1], v[b, :, at : at + 1]
        seq_lens += num_new
        graph.replay()
        torch.maximum(paged, seq_lens - num_new, out=paged)
    page_cases.assert_pages_equal(
        (keys, values), (table, table), page_cases.expected_pages(k, v, case)
    )
    page_cases.assert_tokens_kept(k, v, buffers, case, case.lengths)


def test_prefill_allocates_nothing_on_the_device() -> None:
    method, keys, values, table, _ = _layer(2, 8, 64)
    k, v = torch.randn(2, 2, 8, 4096, 128, dtype=torch.float16, device=DEVICE)
    lens = torch.full((2,), 4096, dtype=torch.int32, device=DEVICE)
    arguments = (k, v, keys, values, table, table, lens, method)
    quantize_pages(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quantize_pages(*arguments)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
def test_memcheck_finds_nothing_in_a_small_run() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(page_cases.__file__).parent)!r})\n"
        "from page_cases import *\n"
        "for case in (Case(heads=1), Case(head_dim=80, heads=1, boost_ratio=0.3, sink=0)):\n"
        "    check_quantize_pages(case, 'cuda'); check_append(case, 'cuda')\n"
        "    check_dequantize(case, 'cuda', torch.float16)\n"
    )
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(
        ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9",
         sys.executable, "-c", program],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


def _copy_bandwidth() -> float:
    """Bytes per second of a large device copy, reads and writes counted."""
    from triton.testing import do_bench

    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.numel() / milliseconds * 1e3


def test_prefill_quantizes_at_two_fifths_of_the_copy_bandwidth() -> None:
    from triton.testing import do_bench

    batch, length, heads = 64, 8192, 8
    method, keys, values, table, _ = _layer(batch, heads, batch * 64)
    k, v = (
        torch.randn(batch, length, heads, 128, dtype=torch.float16, device=DEVICE).transpose(1, 2)
        for _ in range(2)
    )
    lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    key_pages, value_pages = method.key_pages(length), method.value_pages(length)
    layout = PageLayout.of(method, 128)
    dense = 2 * 128 * 128
    moved = key_pages * (dense + layout.key_page_bytes)
    moved += value_pages * (dense + layout.value_page_bytes)
    moved *= batch * heads
    bandwidth = _copy_bandwidth()
    shares = {}
    for key_options, value_options in (
        ({}, {}),
        ({"num_warps": 1}, {"num_warps": 2, "maxnreg": 96}),
        ({"num_warps": 4, "UNROLL": 4}, {"maxnreg": 72}),
    ):
        run = partial(
            launch_quantize_pages, k, v, keys, values, table, table, lens,
            **_plain_arguments(method), key_options=key_options, value_options=value_options,
        )  # fmt: skip
        milliseconds = do_bench(run, return_mode="median", warmup=5, rep=30)
        name = f"keys {key_options}, values {value_options}"
        shares[name] = moved / milliseconds * 1e3 / bandwidth
        print(f"quantize_pages {name}: {milliseconds * 1e3:.0f} µs, {shares[name]:.1%} of copy")
    milliseconds = do_bench(
        lambda: quantize_pages(k, v, keys, values, table, table, lens, method), return_mode="median"
    )
    share = moved / milliseconds * 1e3 / bandwidth
    print(f"quantize_pages, public: {share:.1%} of the copy's {bandwidth / 1e12:.2f} TB/s")
    assert share >= 0.40, shares


def test_append_takes_at_most_12_microseconds_a_layer_amortized_over_a_page() -> None:
    from triton.testing import do_bench_cudagraph

    batch, heads = 64, 8
    method, keys, values, table, buffers = _layer(batch, heads, batch * 8)
    k, v = torch.randn(2, batch, heads, 1, 128, dtype=torch.float16, device=DEVICE)
    # with R = G a key page and a value page fall due in the same call
    full = method.sink + method.window + 3 * method.page_size
    times = {}
    for due, length in (("nothing", full + 50), ("two pages", full + 1)):
        lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        paged = lens - 2
        for warps in (2, 4, 8):
            run = partial(
                launch_append, k, v, keys, values, table, table, buffers, lens, paged, None,
                **_plain_arguments(method), num_warps=warps,
            )  # fmt: skip
            with torch.cuda.stream(torch.cuda.Stream()):
                times[due, warps] = do_bench_cudagraph(run, return_mode="median") * 1e3
            print(f"append, due {due}, warps={warps}: {times[due, warps]:.2f} µs")
    amortized = (127 * times["nothing", 4] + times["two pages", 4]) / 128
    print(f"append amortized over a page: {amortized:.2f} µs")
    assert amortized <= 12, times
