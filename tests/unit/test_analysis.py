"""Channel magnitude, sensitivity, overlap and stability against loops over single pairs."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kitty.analysis import analyze
from kitty.analysis.channels import (
    captured_share,
    chance_jaccard,
    channel_mask,
    channel_sensitivity,
    jaccard,
    key_pages,
    magnitude_map,
    over_pages,
    queries_of_pages,
    selection_overlap,
    selection_stability,
    top_channels,
)
from kitty.errors import KittyError
from kitty.integrations.transformers import SimulatedCache
from kitty.methods import get_method
from kitty.quant import dequantize, quantize

SMALL = get_method("kitty", sink=3, window=5, page_size=4)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="kitty").double().eval()


def text(tokens):
    return torch.randint(0, 61, (tokens,), generator=torch.Generator().manual_seed(1))


def mask(rows):
    return torch.tensor(rows, dtype=torch.bool)


@pytest.mark.parametrize("rollback", [0, 2])
@pytest.mark.parametrize("length", [8, 12, 19, 21])
def test_sensitivity_is_the_mean_squared_change_of_the_scores_when_one_channel_is_quantized(
    length, rollback
):
    method = SMALL.replace(rollback=rollback)
    query, keys, scaling = random(4, length, 6), random(2, length, 6, seed=1), 0.3
    result = channel_sensitivity(query, key_pages(keys, method), method, scaling)
    heads, pages, channels = result.shape
    assert pages == method.key_pages(length - 1)
    for head in range(heads):
        for page in range(pages):
            first = method.sink + page * method.page_size
            tokens = range(first, first + method.page_size)
            seeing = [t for t in range(length) if method.key_pages(t) > page]
            for channel in range(channels):
                changed = keys[head // 2].clone()
                group = changed[first : first + method.page_size, channel]
                changed[first : first + method.page_size, channel] = dequantize(
                    *quantize(group, 2, dim=0), torch.float64
                )
                squares = [
                    (scaling * query[head, t] @ (changed[s] - keys[head // 2, s])).item() ** 2
                    for t in seeing
                    for s in tokens
                ]
                expected = sum(squares) / len(squares)
                assert result[head, page, channel].item() == pytest.approx(expected, rel=1e-9)


def test_the_mean_over_pages_runs_over_all_pairs():
    query, keys = random(2, 20, 4), random(1, 20, 4, seed=1)
    sensitivity = channel_sensitivity(query, key_pages(keys, SMALL), SMALL, 1.0)
    queries = queries_of_pages(SMALL, 20)
    assert queries.tolist() == [13, 9, 5, 1]  # pages are seen from tokens 7, 11, 15, 19 on
    expected = sum(sensitivity[:, p] * n for p, n in enumerate([13, 9, 5, 1])) / 28
    torch.testing.assert_close(over_pages(sensitivity, queries), expected)


def test_a_page_that_no_query_sees_quantized_has_no_sensitivity():
    keys = random(1, 7, 4)
    assert key_pages(keys, SMALL).shape == (1, 1, 4, 4)
    assert channel_sensitivity(random(1, 7, 4), key_pages(keys, SMALL), SMALL, 1.0).shape[1] == 0


def test_pages_begin_after_the_sink():
    keys = torch.arange(16.0).reshape(1, 16, 1)
    assert key_pages(keys, SMALL).flatten().tolist() == list(range(3, 15))


def test_magnitude_is_the_mean_absolute_key_of_each_channel():
    pages = torch.tensor([[[[1.0, -2.0], [-3.0, 0.5]]]])  # one head, one page, two tokens
    assert magnitude_map(pages).tolist() == [[[2.0, 1.25]]]


def test_overlap_counts_the_chosen_channels_among_the_most_sensitive_ones():
    chosen = mask([[1, 1, 0, 0, 0], [1, 0, 0, 0, 1]])
    sensitivity = torch.tensor([[5.0, 1.0, 4.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0, 2.0]])
    assert selection_overlap(chosen, sensitivity).tolist() == [0.5, 1.0]


def test_equally_sensitive_channels_are_taken_from_the_lowest():
    assert top_channels(torch.tensor([1.0, 2.0, 1.0, 1.0]), 2).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_captured_share_is_the_part_of_the_sensitivity_in_the_chosen_channels():
    sensitivity = torch.tensor([[1.0, 2.0, 5.0], [0.0, 0.0, 0.0]])
    assert captured_share(mask([[1, 0, 1], [1, 1, 0]]), sensitivity).tolist() == [0.75, 0.0]


def test_jaccard_is_intersection_over_union():
    assert jaccard(mask([1, 1, 0, 0]), mask([0, 1, 1, 0])).item() == pytest.approx(1 / 3)


def test_stability_compares_with_the_page_before_and_with_the_first():
    chosen = mask([[[1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]]])
    consecutive, first = selection_stability(chosen)
    assert consecutive[0].tolist() == pytest.approx([1 / 3, 1.0])
    assert first[0].tolist() == pytest.approx([1 / 3, 1 / 3])


def test_channel_lists_become_masks():
    assert channel_mask(torch.tensor([[0, 2]]), 4).tolist() == [[True, False, True, False]]


def test_chance_jaccard_is_the_mean_over_all_pairs_of_sets():
    # sets of 2 of 3 channels: the same with chance 1/3, else one common of three
    assert chance_jaccard(2, 3) == pytest.approx(1 / 3 * 1 + 2 / 3 * 1 / 3)
    assert chance_jaccard(4, 4) == 1.0
    assert math.isclose(chance_jaccard(1, 10), 0.1)


def test_the_analysis_of_a_model_agrees_with_its_keys_and_queries():
    model, method, seen = tiny_model(), SMALL.replace(boost_ratio=0.25), {}
    result = analyze(model, text(41), method, map_layer=1)

    def keep(layer_idx, query, keys, values, output, scaling):
        seen[layer_idx] = query, keys, scaling

    with torch.inference_mode():
        cache = SimulatedCache("fp16", observer=keep)
        model.model(input_ids=text(41)[None], past_key_values=cache)
    query, keys, scaling = seen[1]
    pages = keys[0, :, 3:39].reshape(2, 9, 4, 8)
    maps = result["analysis"]["maps"]
    magnitude = pages.abs().mean(2)
    assert torch.tensor(maps["magnitude"]).double().allclose(magnitude, rtol=1e-3)  # keys in fp16
    top_two = magnitude.topk(2).indices.sort().values
    assert maps["boosted"] == top_two.tolist()
    assert scaling == pytest.approx(8**-0.5)
    expected = over_pages(
        channel_sensitivity(query[0], pages, method, scaling), queries_of_pages(method, 41)
    )
    assert torch.tensor(maps["sensitivity"]).double().allclose(expected, rtol=1e-5)
    assert [layer["layer"] for layer in result["analysis"]["layers"]] == [0, 1, 2]


def test_analysis_metrics_are_means_over_layers_and_lie_in_their_range():
    steps = []
    result = analyze(
        tiny_model(), text(41), SMALL, progress=lambda done, total: steps.append((done, total))
    )
    layers = result["analysis"]["layers"]
    for name, value in result["metrics"].items():
        assert value == pytest.approx(sum(layer[name] for layer in layers) / 3, rel=1e-5)
        assert 0 <= value <= 1
    assert result["metrics"]["overlap_chance"] == 1 / 8
    assert result["metrics"]["captured_best"] >= result["metrics"]["captured"]
    assert result["analysis"]["maps"]["layer"] == 1  # the middle one
    assert steps == [(1, 3), (2, 3), (3, 3)]
    json.dumps(result, allow_nan=False)


def test_what_cannot_be_analysed_is_told():
    model = tiny_model()
    with pytest.raises(KittyError, match=r"11 tokens, but the analysis.*use 12 tokens"):
        analyze(model, text(11), SMALL)
    for ratio, count in ((0.0, 0), (0.01, 0), (0.99, 8), (1.0, 8)):
        with pytest.raises(KittyError, match=f"boosts {count} of 8 channels"):
            analyze(model, text(41), SMALL.replace(boost_ratio=ratio))
    with pytest.raises(KittyError, match="layers 0 to 2"):
        analyze(model, text(41), SMALL, map_layer=3)
