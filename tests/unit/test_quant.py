"""The quantizer against its definition in fp64 and against the properties it promises."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from kitty import KittyError, get_method
from kitty.quant import (
    channel_scores,
    dequantize,
    dequantize_keys,
    dequantize_values,
    hash_channels,
    quantize,
    quantize_keys,
    quantize_values,
    select_channels,
)

BITS = st.integers(1, 8)
FINITE = st.one_of(
    st.floats(-65504, 65504, width=16),
    st.floats(-(2**-16), 2**-16, width=16),
    st.sampled_from([65504.0, -65504.0, 0.0, 2**-24, -(2**-24), 1e3]),
)
GROUPS = hnp.arrays(
    np.float16, hnp.array_shapes(min_dims=2, max_dims=2, max_side=24), elements=FINITE
)


def decoded(x: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(*quantize(x, bits, dim=-1), dtype)


def by_hand(group: np.ndarray, bits: int) -> tuple[list[int], np.float16, np.float16]:
    """The rule in scalar numpy: fp16 and fp32 roundings written out one by one."""
    f32 = np.float32
    with np.errstate(over="ignore"):
        h = np.clip(group.astype(np.float16), np.float16(-65504), np.float16(65504)).astype(f32)
        low, high = h.min(), h.max()
        scale = np.float16(f32(high - low) / f32(2**bits - 1))
    scale = min(scale, np.float16(65504))
    inverse = f32(0) if scale == 0 else f32(1) / f32(scale)
    codes = [
        int(min(max(np.floor(f32(f32(f32(v - low) * inverse) + f32(0.5))), 0), 2**bits - 1))
        for v in h
    ]
    return codes, scale, np.float16(low)


@settings(max_examples=200, deadline=None)
@given(GROUPS, BITS)
def test_codes_scales_and_zeros_are_those_of_the_written_rule(x: np.ndarray, bits: int) -> None:
    codes, scale, zero = quantize(torch.from_numpy(x), bits, dim=-1)
    for row in range(x.shape[0]):
        expected = by_hand(x[row], bits)
        assert codes[row].tolist() == expected[0]
        assert (scale[row].item(), zero[row].item()) == (expected[1], expected[2])


@settings(max_examples=200, deadline=None)
@given(GROUPS, BITS)
def test_the_error_stays_within_the_bound(x: np.ndarray, bits: int) -> None:
    tensor = torch.from_numpy(x)
    codes, scale, zero = quantize(tensor, bits, dim=-1)
    for row in range(x.shape[0]):
        span = Fraction(float(x[row].max())) - Fraction(float(x[row].min()))
        if bits == 1 and span > 65504:
            continue
        step = Fraction(scale[row].item())
        bound = max(step / 2, (2**bits - 1) * Fraction(2) ** -25) * (1 + Fraction(2) ** -20)
        for value, code in zip(x[row].tolist(), codes[row].tolist(), strict=True):
            exact = code * step + Fraction(zero[row].item())
            assert abs(Fraction(value) - exact) <= bound


@settings(max_examples=200, deadline=None)
@given(GROUPS, BITS)
def test_decoded_values_decode_to_themselves(x: np.ndarray, bits: int) -> None:
    codes, scale, _ = quantize(torch.from_numpy(x), bits, dim=-1)
    once = decoded(torch.from_numpy(x), bits)
    twice = quantize(once, bits, dim=-1)
    full = (codes.amax(-1) == 2**bits - 1) & (scale.squeeze(-1) >= 2**-14)
    assert torch.equal(twice.codes[full], codes[full])


@settings(max_examples=100, deadline=None)
@given(GROUPS, BITS)
def test_larger_values_never_get_smaller_codes(x: np.ndarray, bits: int) -> None:
    x = np.sort(x, axis=1)
    codes = quantize(torch.from_numpy(x), bits, dim=-1).codes.int()
    assert (codes.diff(dim=-1) >= 0).all()


@settings(max_examples=100, deadline=None)
@given(GROUPS, BITS, st.randoms(use_true_random=False))
def test_order_within_a_group_does_not_matter(x: np.ndarray, bits: int, random) -> None:
    order = list(range(x.shape[1]))
    random.shuffle(order)
    plain, mixed = (quantize(torch.from_numpy(y), bits, dim=-1) for y in (x, x[:, order]))
    assert torch.equal(plain.codes[:, order], mixed.codes)
    assert torch.equal(plain.scale, mixed.scale)
    assert torch.equal(plain.zero, mixed.zero)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", range(1, 9))
def test_constant_groups_come_back_exactly(dtype: torch.dtype, bits: int) -> None:
    x = torch.tensor([0.0, -3.5, 65504.0, 2.0**-24], dtype=torch.float64).to(dtype)
    x = x[:, None].expand(4, 128)  # bf16 rounds 65504 to 65536, which saturates
    assert torch.equal(decoded(x, bits, torch.float64), x.double().clamp(-65504, 65504))


def test_the_half_way_point_rounds_up() -> None:
    # zero 0, scale 1: 0.5 lies half-way between codes 0 and 1, 1.5 between 1 and 2
    x = torch.tensor([[0.0, 0.5, 1.5, 2.5, 3.0]])
    codes, scale, zero = quantize(x, 2, dim=-1)
    assert (scale.item(), zero.item()) == (1.0, 0.0)
    assert codes.tolist() == [[0, 1, 2, 3, 3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_passes_through_fp16(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * 7).to(dtype)
    through = x.to(torch.float16)
    for a, b in zip(quantize(x, 3, dim=-1), quantize(through, 3, dim=-1), strict=True):
        assert torch.equal(a, b)


def test_values_beyond_fp16_saturate() -> None:
    x = torch.tensor([[1e9, -1e9, 0.0]])
    codes, scale, zero = quantize(x, 2, dim=-1)
    assert zero.item() == -65504
    assert scale.item() == np.float16(131008 / 3)
    assert codes.tolist() == [[3, 0, 1]]  # 65504 / 43680 = 1.4996
    assert decoded(x, 2).abs().max() <= 65504


def test_the_scale_of_one_bit_saturates_below_infinity() -> None:
    codes, scale, zero = quantize(torch.tensor([[-65504.0, 65504.0]]), 1, dim=-1)
    assert scale.item() == 65504
    assert torch.isfinite(dequantize(codes, scale, zero, torch.float32)).all()


def test_a_large_offset_in_fp32_keeps_the_spread_that_fp16_keeps() -> None:
    x = torch.tensor([[1000.1, 1000.4, 1000.6, 1001.0]])
    codes, scale, zero = quantize(x, 2, dim=-1)
    assert zero.item() == 1000.0  # fp16 spacing at 1000 is 0.5
    assert codes.tolist() == [[0, 2, 2, 3]]  # fp16 holds 1000, 1000.5, 1000.5, 1001
    assert scale.item() == np.float16(1 / 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_checked_mode_refuses_what_is_not_finite(bad: float) -> None:
    x = torch.ones(1, 1, 1, 8, 4)
    x[..., 3, 2] = bad
    method = get_method("kitty", page_size=8)
    with pytest.raises(KittyError, match="1 NaN or inf elements of 32"):
        quantize_keys(x, method, layer=0, checked=True)
    with pytest.raises(KittyError, match="1 NaN or inf"):
        quantize_values(x, method, checked=True)


@pytest.mark.parametrize(
    ("bad", "code"), [(float("nan"), 0), (-float("inf"), 0), (float("inf"), 3)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unchecked_what_is_not_finite_touches_nothing_else(
    bad: float, code: int, dtype: torch.dtype
) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3, 5] = 0.0
    without = torch.cat([x[3, :5], x[3, 6:]])[None]
    x[3, 5] = bad
    codes, scale, zero = quantize(x, 2, dim=-1)
    expected = quantize(without, 2, dim=-1)
    assert codes[3, 5] == code
    assert torch.equal(torch.cat([codes[3, :5], codes[3, 6:]])[None], expected.codes)
    assert torch.equal(scale[3:4], expected.scale)
    assert torch.equal(zero[3:4], expected.zero)
    assert torch.isfinite(dequantize(codes, scale, zero, dtype)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_without_finite_elements_decodes_to_zero(bad: float) -> None:
    x = torch.full((2, 8), bad)
    assert torch.equal(decoded(x, 2), torch.zeros(2, 8))


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(KittyError, match=f"bits is {bits}"):
        quantize(torch.zeros(1, 4), bits, dim=-1)


@pytest.mark.parametrize("bits", [2.0, 2.5, "2", None, np.int64(9), torch.tensor([2.0])])
def test_bits_that_are_no_whole_number_are_refused(bits: object) -> None:
    with pytest.raises(KittyError, match="whole numbers from 1 to 8"):
        quantize(torch.zeros(1, 4), bits, dim=-1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [0, 9])
def test_a_tensor_of_bits_is_checked_in_checked_mode(bits: int) -> None:
    with pytest.raises(KittyError, match="whole numbers from 1 to 8"):
        quantize(torch.zeros(2, 4), torch.tensor([[2], [bits]]), dim=-1, checked=True)


def test_groups_without_an_element_are_refused_and_no_groups_at_all_are_not() -> None:
    with pytest.raises(KittyError, match=r"shape \(3, 0\).*no element"):
        quantize(torch.zeros(3, 0), 2, dim=-1)
    codes, scale, zero = quantize(torch.zeros(0, 3), 2, dim=-1)
    assert (codes.shape, scale.shape, zero.shape) == ((0, 3), (0, 1), (0, 1))


def test_what_a_method_keeps_in_16_bit_is_not_quantized() -> None:
    pages = torch.zeros(1, 1, 1, 8, 16)
    with pytest.raises(KittyError, match="keeps keys in 16 bit"):
        quantize_keys(pages, get_method("fp16"), layer=0)
    with pytest.raises(KittyError, match="keeps values in 16 bit"):
        quantize_values(pages, get_method("fp16"))


def test_fp64_is_rounded_once() -> None:
    # beside the middle of two fp16 numbers, closer to it than fp32 can tell
    middles = [1 + 2**-11, -(1 + 2**-11), 2**-25, -(2**-25), 65520 * 2**-8, 0.75 * 2**-24]
    near = [middle * (1 + off) for middle in middles for off in (-(2**-40), 0, 2**-40)]
    x = torch.tensor(near, dtype=torch.float64)
    _, _, zero = quantize(x[:, None], 2, dim=-1)
    assert zero[:, 0].tolist() == x.numpy().astype(np.float16).tolist()


def keys_of(*scales: float, tokens: int = 8) -> Tensor:
    """One page whose channel c alternates between ±scales[c]: ``[1, 1, 1, tokens, D]``."""
    sign = torch.tensor([1.0, -1.0]).repeat(tokens // 2)
    return (sign[:, None] * torch.tensor(scales))[None, None, None]


def test_magnitude_boosts_the_channels_of_largest_absolute_sum() -> None:
    method = get_method("kitty", page_size=8, boost_ratio=0.5)
    chosen = select_channels(keys_of(1.0, 5.0, 2.0, 3.0), method, layer=0)
    assert chosen.tolist() == [[[[1, 3]]]]


def test_variance_boosts_the_channels_that_vary_even_where_others_are_larger() -> None:
    method = get_method("kitty", page_size=8, boost_ratio=0.25, selection="variance")
    keys = keys_of(1.0, 2.0, 0.5, 0.1)
    keys[..., 3] += 100.0
    assert select_channels(keys, method, layer=0).tolist() == [[[[1]]]]
    assert channel_scores(keys, "variance")[0, 0, 0, 1] == 4.0


def test_rotary_boosts_channels_of_wide_range_in_large_pairs() -> None:
    method = get_method("kitty", page_size=8, boost_ratio=0.25, selection="rotary")
    # pairs (0, 2) and (1, 3); ranges 4, 4, 6, 2, magnitudes 16, 16, 24, 8 over 8 tokens
    keys = keys_of(2.0, 2.0, 3.0, 1.0)
    keys[..., 3] += 10.0  # far from 0 but of range 2: magnitude 80
    scores = channel_scores(keys, "rotary")[0, 0, 0]
    assert scores.tolist() == [4 * (16 + 24), 4 * (16 + 80), 6 * (16 + 24), 2 * (16 + 80)]
    assert select_channels(keys, method, layer=0).tolist() == [[[[1]]]]
    assert select_channels(keys, method.replace(selection="magnitude"), layer=0).tolist() == [
        [[[3]]]
    ]


def test_rotary_scores_leave_out_what_is_not_finite_and_constants_score_nothing() -> None:
    keys = keys_of(2.0, 2.0, 3.0, 0.0)
    clean = channel_scores(keys, "rotary")[0, 0, 0]
    assert clean[3] == 0.0
    keys[..., 0, 1], keys[..., 1, 1] = torch.inf, torch.nan
    scores = channel_scores(keys, "rotary")[0, 0, 0]
    assert scores.tolist() == [clean[0], 4 * 12, clean[2], 0.0]
    keys[..., 1] = torch.nan
    assert channel_scores(keys, "rotary")[0, 0, 0].tolist() == [clean[0], 0.0, clean[2], 0.0]


def test_rotary_scores_are_rounded_once_from_exact_sums() -> None:
    keys = torch.randn(1, 1, 1, 128, 6) * torch.tensor([1.0, 8e3, 1e-5, 20.0, 1e-3, 7.0])
    scores = channel_scores(keys, "rotary")[0, 0, 0].tolist()
    half = [[Fraction(v) for v in keys[0, 0, 0, :, c].half().tolist()] for c in range(6)]
    sums = [sum(map(abs, column)) for column in half]
    for c, score in enumerate(scores):
        exact = (max(half[c]) - min(half[c])) * (sums[c] + sums[(c + 3) % 6])
        assert score == float(exact)


def test_ties_go_to_the_lower_channel() -> None:
    method = get_method("kitty", page_size=8, boost_ratio=0.5)
    chosen = select_channels(keys_of(2.0, 1.0, 2.0, 2.0, 1.0, 2.0), method, layer=0)
    assert chosen.tolist() == [[[[0, 2, 3]]]]


def test_magnitude_scores_are_exact_where_fp32_sums_would_round() -> None:
    keys = torch.zeros(1, 1, 1, 128, 2)
    keys[..., :, 0] = 32768.0
    keys[..., :, 1] = 32768.0
    keys[..., 127, 1] += 2**-24  # lost in fp16 already: the channels tie
    keys[..., 0, 1] = 32736.0
    keys[..., 1, 1] = 32800.0 - 2**-24
    scores = channel_scores(keys, "magnitude")[0, 0, 0]
    exact = [sum(Fraction(float(v)) for v in keys[0, 0, 0, :, c].half().tolist()) for c in (0, 1)]
    assert [Fraction(s) for s in scores.tolist()] == exact


def test_random_channels_depend_on_seed_layer_head_and_page_but_not_on_the_batch() -> None:
    method = get_method("kitty-25-random")
    keys = torch.randn(2, 3, 4, 128, 64)
    chosen = select_channels(keys, method, layer=2)
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen, select_channels(torch.randn_like(keys), method, layer=2))
    flat = {tuple(c) for c in chosen[0].flatten(0, 1).tolist()}
    assert len(flat) == 12
    later = select_channels(keys[:, :, :2], method, layer=2, first_page=2)
    assert torch.equal(later, chosen[:, :, 2:])
    ragged = select_channels(keys[:, :, :2], method, layer=2, first_page=torch.tensor([0, 2]))
    assert torch.equal(ragged[0], chosen[0, :, :2])
    assert torch.equal(ragged[1], chosen[0, :, 2:])
    for other in (
        select_channels(keys, method, layer=3),
        select_channels(keys, method.replace(seed=1), layer=2),
    ):
        assert not torch.equal(chosen, other)


def test_random_channels_are_drawn_evenly() -> None:
    method = get_method("kitty-25-random")
    chosen = select_channels(torch.zeros(1, 8, 512, 128, 16), method, layer=0)
    share = torch.bincount(chosen.flatten(), minlength=16) / (8 * 512)
    # binomial with p = 1/4 and 4096 draws: standard deviation 0.0068
    assert ((share - 0.25).abs() < 5 * 0.0068).all()


def test_the_hash_is_murmur3s_finalizer_folded_over_the_counters() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    expected = mix(mix(mix(mix(mix(7) ^ 3) ^ 1) ^ 5) ^ 9)
    assert hash_channels(7, 3, 2, torch.tensor([[5]]), 16)[0, 1, 0, 9].item() == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["magnitude", "variance"]))
def test_token_order_leaves_scale_zero_and_channels_and_channel_order_permutes_them(
    seed: int, selection: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 2, 2, 8, 16, generator=generator, dtype=torch.float64)
    method = get_method("kitty-pro", page_size=8, selection=selection)
    plain = quantize_keys(keys, method, layer=0)
    tokens = torch.randperm(8, generator=generator)
    moved = quantize_keys(keys[..., tokens, :], method, layer=0)
    assert torch.equal(moved.channels, plain.channels)
    assert torch.equal(moved.scale, plain.scale)
    assert torch.equal(moved.zero, plain.zero)
    assert torch.equal(moved.codes, plain.codes[..., tokens, :])
    channels = torch.randperm(16, generator=generator)
    moved = quantize_keys(keys[..., channels], method, layer=0)
    assert torch.equal(moved.codes, plain.codes[..., channels])
    assert torch.equal(channels[moved.channels].sort(-1).values, plain.channels)


def test_boosted_channels_get_four_bits_and_the_others_two() -> None:
    keys = torch.randn(1, 1, 3, 128, 64, generator=torch.Generator().manual_seed(3))
    pages = quantize_keys(keys, get_method("kitty"), layer=0)
    highest = pages.codes.amax(dim=-2)  # [1, 1, 3, 64]
    boosted = torch.zeros_like(highest, dtype=torch.bool).scatter(-1, pages.channels, True)
    assert (highest[boosted] == 15).all()
    assert (highest[~boosted] == 3).all()


def test_every_page_and_head_chooses_for_itself() -> None:
    keys = torch.cat([keys_of(9.0, 1.0), keys_of(1.0, 9.0)], dim=2)  # two pages
    keys = torch.cat([keys, keys.flip(2)], dim=1)  # two heads
    method = get_method("kitty", page_size=8, boost_ratio=0.5)
    assert select_channels(keys, method, layer=0)[..., 0].tolist() == [[[0, 1], [1, 0]]]


def test_values_share_a_scale_per_token_over_at_most_a_page_of_channels() -> None:
    values = torch.randn(1, 1, 1, 4, 256, generator=torch.Generator().manual_seed(4))
    method = get_method("kitty-pro", page_size=128)
    pages = quantize_values(values[..., :4, :], method)
    assert pages.scale.shape == (1, 1, 1, 4, 2)
    for group in range(2):
        part = slice(128 * group, 128 * group + 128)
        single = quantize(values[..., part], 2, dim=-1)
        assert torch.equal(pages.codes[..., part], single.codes)
        assert torch.equal(pages.scale[..., group], single.scale.squeeze(-1))


@pytest.mark.parametrize(
    "method_name", ["k1v2-sink", "kitty-pro", "kivi-k4v4", "k1v2-boost2-25-magnitude"]
)
def test_pages_decode_to_what_their_codes_say_in_any_dtype(method_name: str) -> None:
    method = get_method(method_name)
    keys = torch.randn(1, 2, 2, 128, 80, generator=torch.Generator().manual_seed(5))
    pages = quantize_keys(keys, method, layer=0)
    exact = pages.codes.double() * pages.scale.double() + pages.zero.double()
    assert torch.equal(dequantize_keys(pages, torch.float64), exact.float().double())
    assert torch.equal(dequantize_keys(pages, torch.bfloat16), exact.float().bfloat16())
    values = quantize_values(keys, method)
    exact = values.codes.double() * values.scale.double() + values.zero.double()
    assert torch.equal(dequantize_values(values, torch.float64), exact.float().double())
