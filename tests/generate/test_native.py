"""The patch series: applied to, checked on and reverted from a copy of the installed package."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PROGRAM = """
import sys, torch, kitty
from pathlib import Path
from transformers import DynamicCache, GenerationConfig, StaticCache
from kitty import KittyCache, KittyError, SimulatedCache
from tiny_models import greedy, make, prompt

ids, _ = prompt(180)
config = {"method": "kitty", "rollback": 8}
plain = kitty.enable(make("llama", torch.float32), "kitty", cache="packed", rollback=8)
expected = greedy(plain, ids, max_new_tokens=150, return_dict_in_generate=True)
turn = torch.cat([expected.sequences, ids[:, :20]], dim=1)
later = greedy(plain, turn, past_key_values=expected.past_key_values)

model = make("llama", torch.float32)
native = dict(cache_implementation="kitty", cache_config=config)
out = greedy(model, ids, max_new_tokens=150, return_dict_in_generate=True, **native)
assert isinstance(out.past_key_values, KittyCache)
assert out.past_key_values.method == expected.past_key_values.method
assert out.past_key_values.quantized_pages_read > 0
assert torch.equal(out.sequences, expected.sequences)

# saved with the generation config and loaded again, it serves every later generate
model.generation_config = GenerationConfig(**native, pad_token_id=0, bos_token_id=1)
model.generation_config.save_pretrained(sys.argv[1])
model.generation_config = GenerationConfig.from_pretrained(sys.argv[1])
out = greedy(model, ids, max_new_tokens=150, return_dict_in_generate=True)
assert torch.equal(out.sequences, expected.sequences)
assert out.past_key_values.method.rollback == 8

# a cache that is passed wins: second turns work
assert torch.equal(greedy(model, turn, past_key_values=out.past_key_values), later)

# assisted decoding keeps the cache
found = greedy(model, ids, max_new_tokens=150, eos_token_id=1, return_dict_in_generate=True,
               assistant_model=make("llama", torch.float32), cache_implementation="kitty",
               cache_config={**config, "rollback": 40})
assert isinstance(found.past_key_values, KittyCache)

# each call its own configuration
out = greedy(model, ids, return_dict_in_generate=True, cache_implementation="kitty",
             cache_config={"method": "kivi-k2v4-sink", "cache": "simulated"})
assert isinstance(out.past_key_values, SimulatedCache)
assert out.past_key_values.method.name == "kivi-k2v4-sink"

# enable() on a model whose saved default names the cache
kitty.enable(model, "kitty-pro", cache="simulated")
out = greedy(model, ids, return_dict_in_generate=True)
assert isinstance(out.past_key_values, SimulatedCache)
greedy(model, turn, past_key_values=SimulatedCache("kitty"))

# saved and loaded with the whole model
from transformers import AutoModelForCausalLM, BartConfig, BartForConditionalGeneration
saved = make("llama", torch.float32)
saved.generation_config = GenerationConfig(**native, pad_token_id=0, bos_token_id=1)
saved.save_pretrained(sys.argv[1])
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1])
out = greedy(loaded, ids, max_new_tokens=150, return_dict_in_generate=True)
assert torch.equal(out.sequences, expected.sequences)
assert out.past_key_values.method == expected.past_key_values.method

# any cache object wins over the saved default
for given in DynamicCache(), SimulatedCache("kivi-k2v2"):
    out = greedy(loaded, ids, past_key_values=given, return_dict_in_generate=True)
    assert out.past_key_values is given
# (the saved configuration of a cache belongs to its kind, so it goes too)
out = greedy(loaded, ids, cache_implementation="static", cache_config=None,
             return_dict_in_generate=True)
assert isinstance(out.past_key_values, StaticCache)

# what cannot work says so in one sentence
bart = BartForConditionalGeneration(BartConfig(
    vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=2, decoder_attention_heads=2,
))
for said, refused, options in (
    ("Contrastive search", loaded, {"penalty_alpha": 0.6, "top_k": 4}),
    ("tuples of keys and values", loaded,
     {"return_dict_in_generate": True, "return_legacy_cache": True}),
    ("encoder-decoder", bart, {"cache_implementation": "kitty"}),
):
    try:
        greedy(refused, ids[:, :9], **options)
    except KittyError as error:
        assert said in str(error) and ". " not in str(error), error
    else:
        raise AssertionError(said)

wrong = {"method": "kity"}, {"boost_ratio": 2}, {"cache": "magic"}, {"colour": 1}
for bad in wrong:
    try:
        greedy(make(), ids, cache_implementation="kitty", cache_config=bad)
    except KittyError as error:
        assert str(list(bad.values())[-1]) in str(error) or "colour" in str(error), error
    else:
        raise AssertionError(bad)
print("done")
"""

PLUGIN = """
import torch, kitty
from kitty import KittyCache, SimulatedCache
from tiny_models import greedy, make, prompt
from transformers import DynamicCache, StaticCache

ids, mask = prompt(180, 20)
more, _ = prompt(150, 150, seed=1)
for name, cache in ("llama", "packed"), ("gemma3", "packed"), ("gemma2", "simulated"):
    kind = {"packed": KittyCache, "simulated": SimulatedCache}[cache]
    model = make(name, torch.float32)
    if name != "llama":
        model.generation_config.cache_implementation = "hybrid"  # as Gemma's own checkpoints have
    kitty.enable(model, "kitty-pro", cache=cache, sink=4, window=8)
    first = greedy(model, ids, mask, max_new_tokens=20, return_dict_in_generate=True)
    held = first.past_key_values
    assert isinstance(held, kind) and held.method.sink == 4
    text = torch.cat([first.sequences, more], dim=1)
    seen = torch.cat([mask, torch.ones_like(text[:, mask.shape[1] :])], dim=1)
    second = greedy(model, text, seen, max_new_tokens=20, past_key_values=held,
                    return_dict_in_generate=True)
    assert second.past_key_values is held
    assert held.layers[1].lengths == [180 + 20 + 150 + 19, 20 + 20 + 150 + 19]
    assert held.quantized_pages_read > 0
    # a cache that was made by hand serves the same two turns
    own = kind("kitty-pro", sink=4, window=8)
    assert torch.equal(first.sequences,
                       greedy(model, ids, mask, max_new_tokens=20, past_key_values=own))
    assert torch.equal(second.sequences,
                       greedy(model, text, seen, max_new_tokens=20, past_key_values=own))
    # what the call itself asks for wins
    for given, expected in (
        ({"past_key_values": DynamicCache()}, DynamicCache),
        ({"past_key_values": SimulatedCache("kivi-k2v2")}, SimulatedCache),
        *([({"cache_implementation": "static"}, StaticCache)] if name == "llama" else []),
    ):
        if "past_key_values" in given and name != "llama":
            continue  # transformers refuses an object beside the model's own "hybrid"
        out = greedy(model, ids, mask, return_dict_in_generate=True, **given)
        assert isinstance(out.past_key_values, expected), type(out.past_key_values)
    kitty.disable(model)
    out = greedy(model, ids, mask, max_new_tokens=3, return_dict_in_generate=True)
    assert not isinstance(out.past_key_values, (KittyCache, SimulatedCache))
print("done")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with a transformers of its own: the files that patches change are copies."""
    folder = tmp_path_factory.mktemp("site")
    package = importlib.metadata.distribution("transformers")
    source = Path(str(package.locate_file("transformers")))
    (folder / "transformers").mkdir()
    for entry in source.iterdir():
        target = folder / "transformers" / entry.name
        if entry.name == "generation":
            shutil.copytree(entry, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name == "cache_utils.py":
            shutil.copyfile(entry, target)
        elif entry.name != "__pycache__":
            target.symlink_to(entry)
    info = next(source.parent.glob("transformers-*.dist-info"))
    shutil.copytree(info, folder / info.name)
    patch(folder, "revert")  # where the installed one is patched, as in the container image
    return folder


def run(site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def patch(site: Path, verb: str) -> str:
    done = run(site, "-m", "kitty", "patch", verb)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_patched_transformers_makes_the_cache_by_name_and_the_released_one_comes_back(
    site: Path, tmp_path: Path
) -> None:
    released = (site / "transformers/generation/utils.py").read_bytes()
    assert "not applied" in patch(site, "check")
    patch(site, "apply")
    assert patch(site, "check").endswith("are applied.")
    done = run(site, "-c", PROGRAM, str(tmp_path))
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]
    plugged = run(site, "-c", PLUGIN)
    assert plugged.stdout.endswith("done\n"), plugged.stderr[-3000:]
    patch(site, "revert")
    assert (site / "transformers/generation/utils.py").read_bytes() == released


def test_enable_generate_and_a_second_turn_work_without_the_patches(site: Path) -> None:
    assert "not applied" in patch(site, "check")
    done = run(site, "-c", PLUGIN)
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]


def test_a_changed_file_is_never_touched(site: Path) -> None:
    file = site / "transformers/generation/utils.py"
    released = file.read_text()
    file.write_text(released + "# mine\n")
    try:
        for verb in ("apply", "check", "revert"):
            done = run(site, "-m", "kitty", "patch", verb)
            assert done.returncode == 2
            assert "generation/utils.py" in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1
        assert file.read_text() == released + "# mine\n"
    finally:
        file.write_text(released)


def test_another_version_is_refused(site: Path) -> None:
    info = next(site.glob("transformers-*.dist-info")) / "METADATA"
    text = info.read_text()
    info.write_text(text.replace("Version: 4.53.2", "Version: 4.53.3"))
    try:
        done = run(site, "-m", "kitty", "patch", "apply")
        assert done.returncode == 2
        assert "transformers 4.53.3 is installed, but the patches are for 4.53.2" in done.stderr
    finally:
        info.write_text(text)
