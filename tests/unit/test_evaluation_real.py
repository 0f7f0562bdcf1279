"""The vectorized pass on the real small model against decoding it token by token."""

import pytest
import torch

from kitty.evaluation import write_reference
from kitty.evaluation.offline import score_hidden
from kitty.evaluation.reference import final_hidden, head_logits
from kitty.integrations.transformers import SimulatedCache
from kitty.methods import get_method
from kitty.models import load_model
from kitty.texts import load_passage

SMALL_PAGES = {"sink": 8, "window": 16, "page_size": 32}


def compare(dtype, method, tokens, tmp_path):
    """Relative RMS between one pass's logits and decoding's, against that of the 16-bit model's."""
    model, tokenizer = load_model("smollm2-135m-instruct", dtype=dtype)
    ids = torch.tensor(tokenizer(load_passage("python-data-model").text).input_ids[:tokens])
    reference = write_reference(model, ids, tmp_path / "r.safetensors")
    with torch.inference_mode():
        cache = SimulatedCache(method)
        stepwise = torch.cat([final_hidden(model, token[None], cache) for token in ids])
        hidden = final_hidden(model, ids, SimulatedCache(method, dense_prefill=False))
        one, other, exact = (head_logits(model, h) for h in (hidden, stepwise, reference.hidden))
    norm = other.norm()
    error, effect = ((one - other).norm() / norm).item(), ((exact - other).norm() / norm).item()
    print(f"{method.name}, {dtype}: relative RMS {error:.2e}, of the method itself {effect:.2e}")
    return error, effect, [score_hidden(model, h, reference) for h in (hidden, stepwise)]


def test_logits_equal_those_of_decoding_in_fp64(tmp_path):
    error, effect, _ = compare("float64", get_method("kitty-pro", **SMALL_PAGES), 72, tmp_path)
    assert error < 1e-11  # a single code off by one would give about 1e-6
    assert effect > 1e-2  # quantization is at work


# fp32 adds in another order, which alone moves logits by about 1e-6. Where it moves a key across a
# rounding boundary, that code is off by one: an error like the method's own, but of few codes.


def test_logits_equal_those_of_decoding_in_fp32(tmp_path):
    method = get_method("kitty-pro", **SMALL_PAGES)
    error, effect, (one, other) = compare("float32", method, 104, tmp_path)
    assert error < 0.05 * effect
    assert one.kl.mean().item() == pytest.approx(other.kl.mean().item(), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kivi-k2v2", "kitty-pro"])
def test_logits_equal_those_of_decoding_in_fp32_with_the_methods_own_pages(tmp_path, name):
    error, effect, (one, other) = compare("float32", get_method(name), 450, tmp_path)
    assert error < 0.05 * effect
    assert one.kl.mean().item() == pytest.approx(other.kl.mean().item(), rel=0.02)
