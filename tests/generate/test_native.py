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
from transformers import GenerationConfig
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
    patch(site, "revert")
    assert (site / "transformers/generation/utils.py").read_bytes() == released


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
