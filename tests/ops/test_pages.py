"""The packed format: sizes and planes against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from kitty.errors import KittyError
from kitty.methods import get_method
from kitty.ops.quantize_pages import kernel
from kitty.pages import (
    PLANE_BITS,
    PLANES,
    BufferLayout,
    KeyPages,
    PageLayout,
    boost_index,
    empty_buffers,
    empty_key_pages,
    empty_value_pages,
    pack_keys,
    pack_values,
    pack_words,
    report_bytes,
    table_bytes,
    tensor_bytes,
    unpack_keys,
    unpack_values,
    unpack_words,
)
from kitty.quant import FP16_MAX, QuantizedKeys, QuantizedValues, quantize_keys, quantize_values


def test_a_full_page_of_kitty_pro_has_the_bytes_of_the_format() -> None:
    layout = PageLayout.of(get_method("kitty-pro"), 128)
    assert (layout.key_page_bytes, layout.value_page_bytes) == (5664, 4608)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "num_boosted", "key_bytes", "value_bytes"),
    [
        (64, 128, 8, 16 * 64 * 2 + 16 * 8 * 2 + 256 + 8, 16 * 64 * 2 + 512),
        (80, 128, 0, 16 * 80 * 2 + 320, 16 * 80 * 2 + 512),
        (96, 128, 96, 2 * 16 * 96 * 2 + 384 + 96, 16 * 96 * 2 + 512),
        (256, 128, 64, 16 * 256 * 2 + 16 * 64 * 2 + 1024 + 64, 16 * 256 * 2 + 2 * 512),
        (256, 256, 64, 32 * 256 * 2 + 32 * 64 * 2 + 1024 + 64, 32 * 256 * 2 + 1024),
    ],
)
def test_page_bytes_of_other_shapes(
    head_dim: int, page_size: int, num_boosted: int, key_bytes: int, value_bytes: int
) -> None:
    layout = PageLayout(head_dim, page_size, num_boosted)
    assert (layout.key_page_bytes, layout.value_page_bytes) == (key_bytes, value_bytes)
    assert tensor_bytes(empty_key_pages(layout, 3, 2)) == 6 * key_bytes
    assert tensor_bytes(empty_value_pages(layout, 3, 2)) == 6 * value_bytes


@pytest.mark.parametrize("name", ["kitty", "kitty-pro", "kivi-k2v2-sink", "kivi-k4v2-sink"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_page_bytes_are_the_bits_that_the_method_states(name: str, head_dim: int) -> None:
    method = get_method(name)
    layout = PageLayout.of(method, head_dim)
    key_bits, value_bits = method.bits_per_element(head_dim)
    elements = head_dim * method.page_size
    listed = 0 if method.key_bits == 2 else head_dim  # uniform 4 bit: every channel is listed
    assert layout.key_page_bytes == key_bits * elements / 8 + listed
    assert layout.value_page_bytes == value_bits * elements / 8


def test_a_word_holds_eight_tokens_an_eighth_of_a_page_apart() -> None:
    codes = torch.zeros(128, 16, dtype=torch.uint8)
    codes[5, 2] = 3  # row 5, plane 0
    codes[5 + 16, 2] = 1  # plane 1
    codes[5 + 7 * 16, 2] = 2  # plane 7: the sign bit
    words = pack_words(codes)
    assert words.shape == (16, 16)
    assert int(words[5, 2]) & 0xFFFF == 0b10_00_00_00_00_00_01_11
    assert words.count_nonzero() == 1
    wide = pack_words(torch.zeros(256, 16).index_fill(0, torch.tensor([33]), 1))
    assert int(wide[1, 0]) == 0b01_00  # token 33 of 256: row 1, plane 1


def test_words_unpack_to_the_codes_they_were_packed_from() -> None:
    codes = torch.randint(0, 4, (2, 3, 256, 32), dtype=torch.uint8)
    assert torch.equal(unpack_words(pack_words(codes)), codes)


def _pack_by_hand(codes: list[list[int]]) -> list[list[int]]:
    """Words of a page of python integers."""
    rows = len(codes) // 8
    return [
        [sum(codes[t + 8 * 2 * j][c] << 2 * j for j in range(8)) for c in range(len(codes[0]))]
        for t in range(rows)
    ]


def test_packed_keys_hold_low_and_high_planes_as_worked_out_by_hand() -> None:
    layout = PageLayout(16, 128, 3)
    codes = torch.randint(0, 4, (1, 1, 1, 128, 16), dtype=torch.uint8)
    channels = torch.tensor([0, 9, 15])
    codes[..., channels] = torch.randint(0, 16, (1, 1, 1, 128, 3), dtype=torch.uint8)
    scale = torch.rand(1, 1, 1, 1, 16).half()
    zero = -torch.rand(1, 1, 1, 1, 16).half()
    zero[..., 4] = -0.0
    packed = pack_keys(QuantizedKeys(codes, scale, zero, channels.view(1, 1, 1, 3)), layout)
    page = codes[0, 0, 0]
    low = torch.tensor(_pack_by_hand((page & 3).tolist()))
    high = torch.tensor(_pack_by_hand((page[:, channels] >> 2).tolist()))
    assert torch.equal(packed.words[0, 0].int() & 0xFFFF, low)
    assert torch.equal(packed.high[0, 0].int() & 0xFFFF, high)
    assert packed.boosted.tolist() == [[[0, 9, 15]]]
    assert torch.equal(packed.meta[0, 0, 0], scale.flatten())
    assert torch.equal(packed.meta[0, 0, 1], zero.flatten())
    assert not torch.signbit(packed.meta[0, 0, 1, 4])


def test_packed_values_hold_scale_and_zero_of_each_token_by_group() -> None:
    codes = torch.randint(0, 4, (1, 1, 1, 128, 256), dtype=torch.uint8)
    scale, zero = torch.rand(2, 1, 1, 1, 128, 2).half()
    packed = pack_values(QuantizedValues(codes, scale, zero))
    assert packed.meta.shape == (1, 1, 2, 2, 128)
    assert packed.meta[0, 0, 0, 1, 77] == scale[0, 0, 0, 77, 1]
    assert packed.meta[0, 0, 1, 0, 3] == zero[0, 0, 0, 3, 0]


@pytest.mark.parametrize("name", ["kitty-pro", "kivi-k2v2", "kivi-k4v2-sink"])
def test_pages_unpack_to_what_was_quantized_through_any_table(name: str) -> None:
    method = get_method(name)
    layout = PageLayout.of(method, 64)
    x = torch.randn(2, 3, 2, 128, 64)
    q_keys, q_values = quantize_keys(x, method, layer=0), quantize_values(x, method)
    order = torch.tensor([2, 0, 3, 1])
    keys = KeyPages(*(part[order] for part in pack_keys(q_keys, layout)))
    table = order.argsort().view(2, 2)
    got = unpack_keys(keys, table)
    for part, want in zip(got[:3], q_keys[:3], strict=True):
        assert torch.equal(part, want)
    assert got.channels.shape[-1] == layout.num_boosted
    values = unpack_values(pack_values(q_values), torch.arange(4).view(2, 2))
    for part, want in zip(values, q_values, strict=True):
        assert torch.equal(part, want)


def test_the_boost_map_is_the_papers_with_the_sentinel_for_other_channels() -> None:
    boosted = torch.tensor([[1, 8, 200]], dtype=torch.uint8)
    index = boost_index(boosted, 256)
    assert index.dtype == torch.uint8
    assert (int(index[0, 1]), int(index[0, 8]), int(index[0, 200])) == (0, 1, 2)
    assert (index == 3).sum() == 253
    full = boost_index(torch.arange(256).to(torch.uint8), 256)
    assert torch.equal(full.int(), torch.arange(256).int())  # its sentinel would be no uint8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((72,), "head_dim is 72"),
        ((512,), "head_dim is 512"),
        ((128, 64), "page_size is 64"),
        ((128, 128, 129), "num_boosted is 129"),
        ((192, 128), "no multiple of page_size"),
    ],
)
def test_a_shape_that_the_format_cannot_hold_is_refused(arguments: tuple, says: str) -> None:
    with pytest.raises(KittyError, match=says):
        PageLayout(*arguments)


def test_a_method_that_cannot_be_packed_is_refused_with_the_reason() -> None:
    with pytest.raises(KittyError, match="values have 4 bits"):
        PageLayout.of(get_method("kivi-k2v4-sink"), 128)


@pytest.mark.parametrize("rollback", [0, 6, 200])
@pytest.mark.parametrize("largest", [1, 5, 128])
def test_rings_keep_every_token_that_a_crop_may_bring_back(rollback: int, largest: int) -> None:
    method = get_method("kitty-pro", sink=3, window=17, rollback=rollback)
    layout = BufferLayout.of(method, 64, largest_call=largest)
    for length in range(method.sink + largest, 900):
        for taken in {0, 1, rollback // 2, rollback}:
            back = max(length - taken, 0)
            oldest = method.sink + method.key_pages(back) * method.page_size
            assert length - oldest <= layout.key_ring
            oldest = method.sink + method.value_pages(back) * method.page_size
            assert length - oldest <= layout.value_ring
        before = length - largest  # what the call's first query still reads in 16 bit
        oldest = method.sink + method.key_pages(before) * method.page_size
        assert length - oldest <= layout.key_ring


def test_reported_bytes_are_those_of_the_tensors() -> None:
    method = get_method("kitty-pro")
    pages, buffers = PageLayout.of(method, 128), BufferLayout.of(method, 128)
    report = report_bytes(
        pages, buffers, batch=3, heads=2, dtype=torch.bfloat16, key_pages=7, value_pages=5
    ) + table_bytes(3, 9)
    held = [
        empty_key_pages(pages, 7, 2),
        empty_value_pages(pages, 5, 2),
        empty_buffers(buffers, 3, 2, torch.bfloat16),
    ]
    assert [report.key_pages, report.value_pages, report.buffers] == list(map(tensor_bytes, held))
    assert report.tables == 4 * 3 * (9 + 9 + 2)
    assert report.total == sum(map(tensor_bytes, held)) + report.tables


def test_a_view_is_counted_with_its_storage_and_once() -> None:
    x = torch.empty(10, dtype=torch.int32)
    assert tensor_bytes([x, x[:2]]) == 40


def test_the_kernels_restate_the_constants_of_the_specification() -> None:
    assert kernel.FP16_MAX.value == FP16_MAX
    assert (kernel.LOW_TOP.value, kernel.BOOST_TOP.value) == (2**2 - 1, 2**4 - 1)
    assert (kernel.N_PLANES.value, PLANES * PLANE_BITS) == (PLANES, 16)
