"""append, quantize_pages and dequantize_pages against kitty.quant, byte by byte."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from page_cases import (
    CASES,
    LAYER,
    Case,
    assert_pages_equal,
    assert_tokens_kept,
    check_append,
    check_dequantize,
    check_far_pages,
    check_quantize_pages,
    expected_pages,
    poisoned,
    random_tokens,
    storage,
)

from kitty.errors import KittyError
from kitty.ops.append import append
from kitty.ops.dispatch import interpreting
from kitty.ops.quantize_pages import quantize_pages
from kitty.ops.quantize_pages.kernel import as_int32
from kitty.pages import (
    BufferLayout,
    boost_index,
    empty_buffers,
)

# inf in a constant group: the product is dropped, but the interpreter's numpy speaks up
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_writes_the_bytes_of_the_reference(case: Case, device: str) -> None:
    check_quantize_pages(case, device)


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 2, 3, 6, 7, 9)], ids=str)
def test_pages_do_not_depend_on_how_tokens_were_cut_into_calls(case: Case, device: str) -> None:
    check_append(case, device)


def test_single_tokens_past_three_flushes_give_the_reference_pages(device: str) -> None:
    case = Case(head_dim=16, heads=1, lengths=(400,), sink=1, window=0)
    check_append(case, device, calls=(128, 100, 30, *[1] * 400))


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 2, 3, 4, 7)], ids=str)
def test_pages_decode_to_the_values_of_the_simulation(case: Case, device: str) -> None:
    # the interpreter truncates fp32 to bf16, so there only fp16 and fp32 are compared
    dtypes = [torch.float16, torch.bfloat16 if device == "cuda" else torch.float32]
    for dtype in dtypes:
        check_dequantize(case, device, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_torch_reference_of_each_op_passes_the_same_checks(case: Case) -> None:
    with interpreting(False):
        check_quantize_pages(case, "cpu")
        check_append(case, "cpu")
        check_append(dataclasses.replace(case, rollback=case.rollback + 9), "cpu", (1, 200, 3))
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            check_dequantize(case, "cpu", dtype)


@pytest.mark.parametrize("kernel", [False, True])
def test_tokens_taken_back_and_replaced_leave_no_trace(kernel: bool, device: str) -> None:
    case = Case(head_dim=16, heads=1, lengths=(290,), sink=2, window=4, rollback=6)
    method, largest = case.method, 5
    k, v = random_tokens(case, device)
    wrong_k, wrong_v = random_tokens(case, device, seed=1)
    keys, values = storage(case, 3, device)
    table = torch.tensor([[1, 0, 2]], dtype=torch.int32, device=device)
    layout = BufferLayout.of(method, case.head_dim, largest_call=largest)
    buffers = empty_buffers(layout, 1, 1, case.dtype, device)
    poisoned(buffers)
    paged = torch.zeros(1, dtype=torch.int32, device=device)

    def call(source_k: torch.Tensor, source_v: torch.Tensor, at: int, count: int) -> None:
        nonlocal paged
        seq_lens = torch.tensor([at + count], dtype=torch.int32, device=device)
        new = (x[:, :, at : at + count] for x in (source_k, source_v))
        append(*new, keys, values, table, table, buffers, seq_lens, paged, method, layer=LAYER)
        paged = torch.maximum(paged, seq_lens - count)

    with interpreting(kernel and device == "cpu"):
        at = 0
        while at < 270:  # a few right tokens, then at most r wrong ones that are taken back
            call(k, v, at, 4)
            at += 4
            near_flush = (at - 2) % 128 < 16 or (at - 6) % 128 < 16
            if near_flush or not kernel:
                call(wrong_k, wrong_v, at, 5)
                call(wrong_k, wrong_v, at + 5, 1)
                assert_tokens_kept(k, v, buffers, case, (at,))
        call(k, v, at, 5)
    final = dataclasses.replace(case, lengths=(at,))
    assert_pages_equal((keys, values), (table, table), expected_pages(k, v, final))


def test_a_call_longer_than_the_ring_keeps_the_tokens_that_count(device: str) -> None:
    case = Case(head_dim=16, heads=1, lengths=(700,), sink=5, window=9)
    k, v = random_tokens(case, device)
    keys, values = storage(case, 1, device)
    table = torch.full((1, 6), -1, dtype=torch.int32, device=device)
    layout = BufferLayout.of(case.method, case.head_dim)
    buffers = empty_buffers(layout, 1, 1, case.dtype, device)
    lens = torch.tensor([700], dtype=torch.int32, device=device)
    append(k, v, keys, values, table, table, buffers, lens, lens, case.method)
    assert_tokens_kept(k, v, buffers, case, (700,))


def test_pages_behind_two_to_the_31_elements_are_addressed(device: str) -> None:
    check_far_pages(device)


@pytest.mark.parametrize("large", [0.0, 1.0, 65504.0])
@pytest.mark.parametrize("kernel", [False, True])
def test_sums_of_magnitudes_that_differ_in_the_last_bit_are_told_apart(
    large: float, kernel: bool, device: str
) -> None:
    case = Case(head_dim=16, boost_ratio=1 / 16, heads=1, sink=0, window=0, lengths=(128,))
    k = torch.zeros(1, 1, 128, 16, dtype=torch.float16)
    k[0, 0, :, 3] = k[0, 0, :, 9] = large
    k[0, 0, 77, 3] = k[0, 0, 77, 9] = 2.0**-23
    k[0, 0, 77, 9] = -3 * 2.0**-24  # the larger magnitude, by the least step of fp16
    k = k.to(device)
    keys, values = storage(case, 1, device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens = torch.full((1,), 128, dtype=torch.int32, device=device)
    with interpreting(kernel and device == "cpu"):
        quantize_pages(k, k, keys, values, table, table, lens, case.method)
    assert keys.boosted.tolist() == [[[9]]]


def _fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x·y + z of fp32 numbers, rounded once."""
    wide = [part.astype(np.longdouble) for part in (x, y, z)]
    return (wide[0] * wide[1] + wide[2]).astype(np.float32)


@pytest.mark.parametrize("top", [3, 15])
def test_a_product_corrected_by_its_remainder_rounds_like_the_division(top: int) -> None:
    # every significand of fp32: those of one binade, since nothing here is subnormal
    x = np.arange(2**23, 2**24, dtype=np.int32).astype(np.float32)
    divisor, part = np.float32(top), np.float32(1 / top)
    product = x * part
    remainder = _fused(-product, divisor, x)
    assert (_fused(remainder, part, product) == x / divisor).all()


@pytest.mark.parametrize("steps_off", [-2, -1, 0, 1, 2])
def test_an_inverse_corrected_by_its_remainder_is_right_for_every_scale(steps_off: int) -> None:
    scale = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = np.float32(1) / scale
    near = (exact.view(np.int32) + steps_off).view(np.float32)  # the GPU's may be one step off
    remainder = _fused(-scale, near, np.ones_like(scale))
    assert (_fused(remainder, near, near) == exact).all()


def test_a_page_without_an_id_is_skipped(device: str) -> None:
    case = Case(head_dim=16, heads=1, lengths=(270,))
    k, v = random_tokens(case, device)
    keys, values = storage(case, 1, device)
    table = torch.full((1, 2), -1, dtype=torch.int32, device=device)
    lens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    quantize_pages(k, v, keys, values, table, table, lens, case.method)
    for part in (*keys, *values):
        assert (part.view(torch.uint8) == 0xFF).all()


def test_a_large_seed_stays_a_32_bit_argument() -> None:
    assert as_int32(2**32 - 5) == -5
    assert as_int32(7) == 7
    assert as_int32(2**31) == -(2**31)


def test_the_ops_are_registered_with_schemas_and_shapes_that_hold() -> None:
    case = Case(head_dim=16, heads=2, lengths=(140,), window=0)
    k, v = random_tokens(dataclasses.replace(case, special=False), "cpu")
    keys, values = storage(case, 2, "cpu")
    table = torch.tensor([[1]], dtype=torch.int32)
    lens = torch.tensor(case.lengths, dtype=torch.int32)
    layout = BufferLayout.of(case.method, case.head_dim, largest_call=140)
    buffers = empty_buffers(layout, 1, 2, case.dtype)
    plain = (3, 0, 0, "magnitude", 0, LAYER)
    for part in (*keys, *values, *buffers):
        part.zero_()
    index = boost_index(keys.boosted[table], case.head_dim)
    with interpreting(False):
        for op, arguments in (
            ("quantize_pages", (k, v, *keys, *values, table, table, lens, *plain)),
            (
                "append",
                (k, v, *keys, *values, table, table, *buffers, lens, lens, None, *plain),
            ),
            ("dequantize_keys", (*keys, index, table, torch.float16)),
            ("dequantize_values", (*values, table, torch.float16)),
        ):
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(getattr(torch.ops.kitty, op), arguments, test_utils=checks)


@pytest.mark.parametrize("wrong", ["heads", "dtype", "table", "lengths", "boost"])
def test_tensors_that_do_not_fit_are_refused_in_one_sentence(wrong: str) -> None:
    case = Case(head_dim=16, heads=2, lengths=(10,))
    k, v = random_tokens(case, "cpu")
    keys, values = storage(case, 1, "cpu")
    table = torch.zeros(1, 1, dtype=torch.int32)
    lens = torch.tensor(case.lengths, dtype=torch.int32)
    method = case.method
    if wrong == "heads":
        k, v = k[:, :1], v[:, :1]
    elif wrong == "dtype":
        v = v.float()
    elif wrong == "table":
        table = table.long()
    elif wrong == "lengths":
        lens = lens.long()
    else:
        method = method.replace(boost_ratio=0.5)
    with pytest.raises(KittyError):
        quantize_pages(k, v, keys, values, table, table, lens, method)
