"""The real kernels on a real model's queries, keys and values, against fp64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import smollm2_dump

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        not smollm2_dump.DUMP.exists(),
        reason=f"{smollm2_dump.DUMP} is missing: python tests/gpu/smollm2_dump.py make",
    ),
]


@pytest.mark.parametrize("name", smollm2_dump.METHODS)
@pytest.mark.parametrize("layer", smollm2_dump.LAYERS)
@pytest.mark.parametrize("last", [1, 3])
def test_decode_attention_over_a_real_models_cache_is_within_the_rule(
    layer: int, name: str, last: int
) -> None:
    row = smollm2_dump.check_layer(layer, name, "cuda", last)
    print(row)
    assert row["bytes_equal_reference"]
    assert row["relative_rms"] <= 2.0 * row["relative_rms_plain_fp16"]


def test_the_dump_names_the_weights_it_came_from() -> None:
    model = smollm2_dump.load()[1]["model"]
    assert model["weights"] == "Q4_1"
    assert len(model["sha256"]) == 64
