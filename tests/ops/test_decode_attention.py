"""decode_attention and merge_states: kernels, interpreted without a GPU, against fp64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
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

import kitty.ops.decode_attention.kernel
from kitty.errors import KittyError
from kitty.ops.decode_attention import decode_attention, default_splits
from kitty.ops.dispatch import interpreting
from kitty.ops.merge_states import merge_states

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_as_exact_as_plain_16_bit_arithmetic(case: DecodeCase, device: str) -> None:
    check_decode(case, device)


@pytest.mark.parametrize("case", CROSSING, ids=str)
def test_queries_of_a_call_see_their_own_pages(case: DecodeCase, device: str) -> None:
    check_decode(case, device)


@pytest.mark.parametrize("case", RANGES, ids=str)
def test_no_range_of_keys_values_or_queries_overflows(case: DecodeCase, device: str) -> None:
    check_decode(case, device)


@pytest.mark.parametrize("case", CAPPED, ids=str)
def test_capped_logits_are_bent_as_in_fp64(case: DecodeCase, device: str) -> None:
    check_decode(case, device)


def test_a_cap_far_above_the_logits_changes_nothing(device: str) -> None:
    cache = Cache(DecodeCase(lengths=(430,), heads=1), device)
    assert relative_rms(cache.run(softcap=1e4)[0], cache.run()[0].double()) < 2.0**-8
    assert relative_rms(cache.run(softcap=0.5)[0], cache.run()[0].double()) > 0.05


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cap_must_be_positive(softcap: float, device: str) -> None:
    cache = Cache(DecodeCase(lengths=(33,), heads=1), device)
    with pytest.raises(KittyError, match=f"softcap is {softcap}, but it must be a positive"):
        cache.run(softcap=softcap)


def test_the_number_of_splits_does_not_matter(device: str) -> None:
    cache = Cache(DecodeCase(heads=1), device)
    exact, _ = cache.reference(torch.float64, torch.float64)
    plain, _ = cache.reference(torch.float16, None)
    for num_splits in (1, 2, 5, 17):
        assert_within_rule(cache.run(num_splits=num_splits)[0], plain, exact)


def test_pages_may_be_shared_between_sequences(device: str) -> None:
    cache = Cache(DecodeCase(lengths=(300, 300), heads=1), device)
    for table in (cache.key_table, cache.value_table):
        table[1] = table[0]
    for part in cache.buffers:
        part[1] = part[0]
    cache.query[1] = cache.query[0]
    out, lse = cache.run()
    assert torch.equal(out[0], out[1])
    assert torch.equal(lse[0], lse[1])


def test_the_softmax_scale_is_an_argument(device: str) -> None:
    cache = Cache(DecodeCase(lengths=(300,), heads=1), device)
    out, _ = cache.run(softmax_scale=0.25)
    cache.query *= 2.0  # exact
    assert relative_rms(out, cache.run(softmax_scale=0.125)[0].double()) < 1e-6


@pytest.mark.parametrize("size", [0.0, 2.0**-24, 2.0**-15, 2.0**-14, 2.0**-13, 3e4])
def test_queries_of_any_size_weigh_the_tokens_as_the_reference_does(
    size: float, device: str
) -> None:
    # a pad token's embedding is zero, so its query is too in the first layer
    cache = Cache(DecodeCase(lengths=(430,), heads=1), device)
    cache.query = (cache.query / cache.query.abs().max() * size).to(cache.query.dtype)
    exact, _ = cache.reference(torch.float64, torch.float64)
    # Near-equal weights average values of about 1 to nearly 0, while their zeros and codes come in
    # apart and cancel: so the bound is fp16's rounding of the values, not of the small mean.
    assert (cache.run()[0].double() - exact).square().mean().sqrt() < 2.0**-11


def test_query_tensors_may_be_strided(device: str) -> None:
    cache = Cache(DecodeCase(lengths=(300,), num_tokens=2, heads=1), device)
    out, _ = cache.run()
    cache.query = cache.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(cache.run()[0], out)


def test_a_token_with_nan_touches_only_sequences_that_hold_it(device: str) -> None:
    cache = Cache(DecodeCase(lengths=(300, 300), heads=1), device)
    before, _ = cache.run()
    cache.buffers.key_ring[0, :, (299 - 32) % cache.buffers.key_ring.shape[2]] = torch.nan
    out, _ = cache.run()
    assert out[0].isnan().all()
    assert torch.equal(out[1], before[1])


def test_the_reference_on_a_cpu_agrees_with_the_simulated_rounding() -> None:
    cache = Cache(DecodeCase(lengths=(430,), heads=1), "cpu")
    with interpreting(False):
        out, lse = cache.run()
    exact, exact_lse = cache.reference(torch.float64, None)
    assert relative_rms(out, exact) < 2.0**-11  # rounded once, at the end
    assert (lse.double() - exact_lse).abs().max() < 1e-5


def test_the_op_is_registered_with_a_fake_implementation(device: str) -> None:
    cache = Cache(DecodeCase(lengths=(170,), heads=1), device)
    tensors = cache.tensors
    query, keys, values, key_table, value_table, buffers, seq_lens = tensors
    arguments = (query, *keys, *values, key_table, value_table, *buffers, seq_lens)
    torch.library.opcheck(
        torch.ops.kitty.decode_attention.default,
        (*arguments, 32, 128, 0, 0.125, 2),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.kitty.decode_attention.default,
        (*arguments, 32, 128, 0, 0.125, 2, 30.0),
        test_utils=("test_schema", "test_faketensor"),
    )
    parts, lse = torch.randn(2, 3, 4, 16, device=device), torch.randn(2, 3, 4, device=device)
    torch.library.opcheck(
        torch.ops.kitty.merge_states.default,
        (parts, lse, torch.float16),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_longer_tables_get_more_splits(device: str) -> None:
    cache = Cache(DecodeCase(lengths=(170,), heads=1), device)
    assert default_splits(cache.query, cache.keys, cache.key_table) >= 1
    out = decode_attention(*cache.tensors, cache.case.method)
    assert isinstance(out, torch.Tensor)
    assert out.shape == cache.query.shape


def test_wrong_arguments_are_told_in_one_sentence(device: str) -> None:
    cache = Cache(DecodeCase(lengths=(170,), heads=2), device)
    method = cache.case.method
    for name, value in (
        ("query", cache.query[:, :7]),
        ("query", cache.query.transpose(2, 3)),
        ("seq_lens", cache.seq_lens.long()),
        ("key_table", cache.key_table.long()),
    ):
        broken = Cache(cache.case, device)
        setattr(broken, name, value)
        with pytest.raises(KittyError) as caught:
            decode_attention(*broken.tensors, method)
        assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize(("num_parts", "head_dim"), [(1, 64), (5, 80), (40, 128), (300, 16)])
def test_merged_parts_are_attention_over_all_keys(
    num_parts: int, head_dim: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, num_parts, 7, generator=generator, dtype=torch.float64) * 4
    values = torch.randn(3, num_parts, 7, head_dim, generator=generator, dtype=torch.float64)
    parts = torch.softmax(logits, -1).unsqueeze(-2) @ values
    lse = torch.logsumexp(logits, -1)
    want = torch.softmax(logits.flatten(1), -1).unsqueeze(1) @ values.flatten(1, 2)
    out, total = merge_states(parts.squeeze(-2).float().to(device), lse.float().to(device))
    assert relative_rms(out.cpu(), want.squeeze(1)) < 1e-6
    assert (total.cpu() - torch.logsumexp(logits.flatten(1), -1)).abs().max() < 1e-5


def test_parts_without_keys_are_left_out_of_a_merge(device: str) -> None:
    parts = torch.randn(2, 3, 16, device=device)
    lse = torch.randn(2, 3, device=device)
    want = merge_states(parts[:, 1:].contiguous(), lse[:, 1:].contiguous())
    parts[:, 0] = torch.nan
    lse[:, 0] = -torch.inf
    out, total = merge_states(parts, lse)
    assert torch.allclose(out, want[0])
    assert torch.allclose(total, want[1])
    lse[:] = -torch.inf
    out, total = merge_states(parts, lse)
    assert (out == 0).all()
    assert (total == -torch.inf).all()


MUTATIONS = {
    "planes 6 and 7 exchanged": [
        ("b_w5, 6, ASM), b_q)\n    s7", "b_w5, 7, ASM), b_q)\n    s7"),
        ("b_w5, 7, ASM), b_q)\n    return", "b_w5, 6, ASM), b_q)\n    return"),
    ],
    "high plane not raised": [("(b_norm * 4.0)", "(b_norm * 1.0)")],
    "pages shifted by one": [("tl.load(p_key_row + i + 1,", "tl.load(p_key_row + i,")],
    "key scale and zero exchanged": [
        ("b_scale = tl.load(p_page + o_c)", "b_scale = tl.load(p_page + D + o_c)"),
        ("b_zero = tl.load(p_page + D + o_c)", "b_zero = tl.load(p_page + o_c)"),
    ],
    "value scale and zero exchanged": [
        ("b_scale, b_zero = tl.split(b_meta)", "b_zero, b_scale = tl.split(b_meta)")
    ],
    "ring slots off by one": [("% capacity + o_s", "% capacity + o_s + 1")],
    "sink left out": [("sink_blocks = (num_sink + BLOCK_DENSE - 1)", "sink_blocks = 0 * num_sink")],
    "values paged too early": [("num_pages(least, VALUE_UNPAGED", "num_pages(least, KEY_UNPAGED")],
    "last plane of a page lost": [("end - i * N_PLANES, N_PLANES)", "end - i * N_PLANES, 7)")],
    "hidden pages capped": [
        ("b_x = capped(b_x, SOFTCAP) + b_hidden[None, :]", "b_x = capped(b_x, SOFTCAP)")
    ],
    "old sums not rescaled": [
        ("            b_l = b_l * b_alpha[None, :]\n            b_offset", "            b_offset")
    ],
}


def mutated(changes: list[tuple[str, str]], folder: Path) -> ModuleType:
    """The kernel's module with pieces of its source replaced."""
    source = Path(kitty.ops.decode_attention.kernel.__file__).read_text()
    for old, new in changes:
        assert old in source, f"the mutation no longer applies: {old}"
        source = source.replace(old, new)
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = mutated(MUTATIONS[name], tmp_path)
    monkeypatch.setattr(kitty.ops.decode_attention.kernel, "launch_decode", module.launch_decode)
    cases = (DecodeCase(lengths=(700,), heads=1, num_splits=1), CASES[0], CAPPED[2])
    assert not all(passes(case, device) for case in cases)


def passes(case: DecodeCase, device: str) -> bool:
    """Whether a case is within its tolerance."""
    try:
        check_decode(case, device)
    except AssertionError:
        return False
    return True
