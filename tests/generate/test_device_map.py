"""Models spread over devices: every layer's state on its layer's device, the text unchanged."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from tiny_models import CONFIGS, greedy, make, prompt
from torch import Tensor
from transformers import PreTrainedModel

import kitty
from kitty import KittyCache, SimulatedCache
from kitty.integrations.transformers.cache import KittyCacheBase

METHOD = kitty.get_method("kitty-pro", sink=4, window=8)
CACHES = [KittyCache, SimulatedCache]
LENGTHS, NEW = (130, 7), 20  # a page of keys completes at 132 tokens, of values at 140

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def deep_model(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = 4
    if hasattr(config, "layer_types"):
        config.layer_types = (config.layer_types * 4)[:4]
    return make(name, dtype, config)


def spread(model: PreTrainedModel, devices: Sequence[str], head: str) -> PreTrainedModel:
    """Each decoder layer on its device, all that follows the layers on ``head``.

    With accelerate's hooks, but without what ``dispatch_model`` makes of the name "cpu".
    """
    base = model.model
    places = [(base.embed_tokens, devices[0]), (base.rotary_emb, devices[0])]
    places += list(zip(base.layers, devices, strict=True))
    places += [(base.norm, head), (model.lm_head, head)]
    for module, device in places:
        module.to(device)
        add_hook_to_module(module, AlignDevicesHook(execution_device=device))
    return model


def devices_of_state(cache: KittyCacheBase) -> list[str]:
    """Device of each layer's buffers, and for packed layers of their pages too."""
    found = []
    for index in sorted(cache.layers):
        layer = cache.layers[index]
        places = {x.device for x in layer.buffers}
        if isinstance(layer, kitty.cache.PackedLayer):
            pool, at = cache.state.pool, layer.state.layers.index(layer)
            places |= {x.device for x in (*pool.keys.storage(at), *pool.values.storage(at))}
        assert len(places) == 1
        found.append(str(places.pop()))
    return found


def feed(model: PreTrainedModel, cache: KittyCacheBase, lengths: Sequence[int]) -> Tensor:
    """A padded prompt, a padded chunk past a flush, a step: logits of the last one."""
    ids, mask = prompt(*lengths)
    more, _ = prompt(*(140 for _ in lengths), seed=1)
    longer = torch.cat([mask, (more > 0).long()], dim=1)
    longer[:, mask.shape[1] : mask.shape[1] + 3] = 0  # pads in a later call
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        model(more, attention_mask=longer, past_key_values=cache)
        longer = torch.cat([longer, longer[:, -1:]], dim=1)
        return model(more[:, :1], attention_mask=longer, past_key_values=cache).logits


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_on_cpu_and_meta_keep_their_state_there(
    name: str, kind: type[KittyCacheBase]
) -> None:
    model = spread(kitty.enable(deep_model(name), METHOD), ["cpu", "cpu", "meta", "meta"], "meta")
    cache = kind(METHOD)
    logits = feed(model, cache, (20, 5))
    assert logits.shape == (2, 1, 97)
    assert devices_of_state(cache) == ["cpu", "cpu", "meta", "meta"]
    assert cache.layers[3].lengths == [20 + 137 + 1, 5 + 137 + 1]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_weights_change_no_token(
    kind: type[KittyCacheBase], offload: str, tmp_path
) -> None:
    ids, mask = prompt(*LENGTHS)
    texts = []
    for offloaded in (False, True):
        model = deep_model()
        if offloaded and offload == "cpu":  # all weights on meta until their layer runs
            cpu_offload(model, execution_device=torch.device("cpu"))
        elif offloaded:
            disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        kitty.enable(model, METHOD)
        cache = kind(METHOD)
        texts.append(greedy(model, ids, mask, max_new_tokens=NEW, past_key_values=cache))
        assert devices_of_state(cache) == ["cpu"] * 4
    assert torch.equal(*texts)


def check_spread(devices: Sequence[str], head: str, kind: type[KittyCacheBase], name: str) -> None:
    """The text over several devices is that of the first alone, or parts at a tie of rounding."""
    ids, mask = prompt(*LENGTHS)
    outputs = []
    for places, end in (([devices[0]] * 4, devices[0]), (devices, head)):
        model = spread(kitty.enable(deep_model(name, torch.float16), METHOD), places, end)
        cache = kind(METHOD)
        start = torch.device(devices[0])
        out = greedy(
            model,
            ids.to(start),
            mask.to(start),
            max_new_tokens=NEW,
            past_key_values=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert devices_of_state(cache) == list(places)
        outputs.append(out)
    alone, both = outputs
    first = torch.stack(alone.logits).float().cpu()  # [steps, B, vocabulary]
    second = torch.stack(both.logits).float().cpu()
    texts = alone.sequences.cpu()[:, ids.shape[1] :], both.sequences.cpu()[:, ids.shape[1] :]
    for row in range(len(ids)):
        apart = (texts[0][row] != texts[1][row]).nonzero().flatten().tolist()
        step = apart[0] if apart else NEW - 1
        error = (first[: step + 1, row] - second[: step + 1, row]).abs().max()
        top = first[step, row].topk(2).values
        print(f"{kind.__name__}, sequence {row}: parts at {apart[:1]}, logit error {error:.2e}")
        assert not apart or top[0] - top[1] < error
        assert (first[0, row] - second[0, row]).abs().max() < 0.05 * first[0, row].abs().max()
    feed_cache = kind(METHOD)
    assert torch.isfinite(feed(model, feed_cache, (20, 5))).all()
    assert devices_of_state(feed_cache) == list(devices)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_on_a_gpu_and_on_the_cpu_give_the_text_of_the_gpu(
    kind: type[KittyCacheBase], name: str
) -> None:
    check_spread(["cuda:0", "cuda:0", "cpu", "cpu"], "cuda:0", kind, name)
    check_spread(["cpu", "cuda:0", "cuda:0", "cpu"], "cpu", kind, name)


@pytest.mark.gpu
@needs_gpu
def test_a_device_map_that_offloads_to_the_cpu_keeps_the_state_on_the_gpu() -> None:
    model = deep_model("llama", torch.float16)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    layers = {f"model.layers.{i}": "cpu" if i in (1, 2) else 0 for i in range(4)}
    model = kitty.enable(dispatch_model(model, {**places, **layers}), METHOD, cache="packed")
    ids, mask = (x.cuda() for x in prompt(*LENGTHS))
    out = greedy(model, ids, mask, max_new_tokens=NEW, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, KittyCache)
    assert devices_of_state(out.past_key_values) == ["cuda:0"] * 4


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_on_two_gpus_give_the_text_of_one(kind: type[KittyCacheBase], name: str) -> None:
    check_spread(["cuda:0", "cuda:0", "cuda:1", "cuda:1"], "cuda:0", kind, name)
    check_spread(["cuda:1", "cuda:0", "cuda:1", "cuda:0"], "cuda:1", kind, name)
