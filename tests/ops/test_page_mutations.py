"""The suite must notice a broken kernel: each mutation of the source makes a check fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from page_cases import Case, check_append, check_dequantize, check_quantize_pages

import kitty.ops

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

CASE = Case(head_dim=32, heads=1, lengths=(150, 131), sink=3, window=7)
CLEAN = dataclasses.replace(CASE, unclean=False)
SCALE = "tl.store(p_meta + o_c, b_scale.to"
ZERO = "tl.store(p_meta + D + o_c, b_zero.to"
CAREFUL_KEYS = "if unclean > 0:\n        b_low"
CAREFUL_VALUES = "if unclean > 0:\n            tl.debug"
QUANTIZE = {
    "key planes in reverse": (("PLANE * ROWS,", "(7 - PLANE) * ROWS,"),),
    "value planes in reverse": (("+ i_plane * ROWS\n", "+ (7 - i_plane) * ROWS\n"),),
    "one plane flipped": (("b_words.to(tl.int16)", "(b_words ^ 0xC000).to(tl.int16)"),),
    "halves of a row swapped": (("p_word + HALF, b_words2.to", "p_word + HALF, b_words.to"),),
    "low and high plane swapped": (("tl.trans((b_fields >> 16)", "tl.trans(b_fields"),),
    "page shifted by a token": (("+ SINK + i_page * G", "+ SINK + i_page * G - 1"),),
    "key scale and zero swapped": (
        (SCALE, SCALE.replace("b_scale", "b_zero")),
        (ZERO, ZERO.replace("b_zero", "b_scale")),
    ),
    "value scale and zero swapped": (
        ("tl.store(p_token, b_scale", "tl.store(p_token, b_zero"),
        ("STRIDE_ZERO, b_zero", "STRIDE_ZERO, b_scale"),
    ),
    "ties to the higher channel": (("(255 - o_c)", "o_c"),),
    "rounding down": (("b_inverse + 0.5", "b_inverse"),),
    "boosted channels with 2-bit scale": (
        ("tl.where(boosted, BOOST_TOP,", "tl.where(boosted, 3.0,"),
    ),
    "list of boosted channels off by one": (("axis=0) - b_count", "axis=0) - b_count + 1"),),
    "inf and NaN not noticed": ((CAREFUL_KEYS, CAREFUL_KEYS.replace("0", "1")),),
    "inf and NaN in values not noticed": ((CAREFUL_VALUES, CAREFUL_VALUES.replace("0", "1")),),
    "subnormal key scales not noticed": (("axis=0) > LARGEST", "axis=0) > 1e9 * LARGEST"),),
    "subnormal value scales not noticed": (("(b_inverse > LARGEST", "(b_inverse > 1e9 * LARGEST"),),
    "-0.0 stored": (("b_low += 0.0", "b_low += -0.0"),),
}
APPEND = {
    "pages one token too late": (("num_pages(before, KEY", "num_pages(before - 1, KEY"),),
    "tokens before pages": (("before = length - new", "before = length"),),
    "slots off by one": (("slot = ring_slot(", "slot = 1 + ring_slot("),),
    "pads written": (("& (token >= before) ", ""),),
    "keys into the value ring": (("write_tokens(b_v,", "write_tokens(b_k,"),),
}
DEQUANTIZE = {
    "planes in reverse": (("b_words >> (2 * i_plane)", "b_words >> (14 - 2 * i_plane)"),),
    "high plane not raised": (("& 3) * 4", "& 3)"),),
    "scale and zero swapped": (
        ("decoded(b_code, b_scale, b_zero,", "decoded(b_code, b_zero, b_scale,"),
    ),
    "absent pages read": (("tl.where(page >= 0, ", "tl.where(page >= -1, "),),
}


def _mutated(
    op: str, changes: tuple[tuple[str, str], ...], tmp_path: Path, monkeypatch
) -> ModuleType:
    """The op's kernel module with its source changed, loaded in place of the original."""
    source = Path(kitty.ops.__path__[0], op, "kernel.py").read_text()
    for old, new in changes:
        assert old in source, f"the mutation no longer applies: {old!r}"
        source = source.replace(old, new)
    path = tmp_path / "kernel.py"
    path.write_text(source)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = f"kitty.ops.{op}.kernel"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def _check_both(device: str) -> None:
    """Pages with NaN and inf and pages without take different paths."""
    check_quantize_pages(CASE, device)
    check_quantize_pages(CLEAN, device)


@pytest.mark.parametrize("mutation", QUANTIZE)
def test_a_broken_quantize_kernel_is_noticed(mutation: str, tmp_path, monkeypatch, device) -> None:
    _mutated("quantize_pages", QUANTIZE[mutation], tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        _check_both(device)


@pytest.mark.parametrize("mutation", APPEND)
def test_a_broken_append_kernel_is_noticed(mutation: str, tmp_path, monkeypatch, device) -> None:
    _mutated("append", APPEND[mutation], tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check_append(CASE, device)


@pytest.mark.parametrize("mutation", DEQUANTIZE)
def test_a_broken_dequantize_kernel_is_noticed(
    mutation: str, tmp_path, monkeypatch, device
) -> None:
    _mutated("dequantize_pages", DEQUANTIZE[mutation], tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check_dequantize(CASE, device, torch.float16)


def test_an_unchanged_kernel_loaded_the_same_way_passes(tmp_path, monkeypatch, device) -> None:
    _mutated("quantize_pages", (), tmp_path, monkeypatch)
    _check_both(device)
