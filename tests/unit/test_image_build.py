"""The image from outside: lock files, labels, and what is said where something is missing."""

import re
import shutil

import pytest

from kitty.errors import KittyError
from kitty.image import apptainer
from kitty.paths import shipped

SHA = "0123456789abcdef" * 4


@pytest.mark.parametrize("flavour", apptainer.FLAVOURS)
def test_the_flavours_lock_files_pin_and_hash_everything(flavour):
    path = apptainer.lock_file(flavour)
    names = re.findall(r"^([a-z0-9.-]+)==", path.read_text(), re.MULTILINE)
    assert apptainer.check_lock(path) == len(names) > 100
    assert {"torch", "triton", "transformers", "lm-eval", "snakemake", "pytest"} <= set(names)
    assert {"snakemake-executor-plugin-slurm", "hqq", "optimum-quanto"} <= set(names)
    assert not {"mypy", "ruff", "snakefmt"} & set(names)


def test_the_cuda_flavour_is_torch_2_4_1_with_cuda_12_1_and_triton_3_0_0():
    text = apptainer.lock_file("cuda").read_text()
    for pin in ("torch==2.4.1", "triton==3.0.0", "nvidia-cuda-runtime-cu12==12.1.105"):
        assert f"\n{pin} \\" in text
    assert re.search(r"\nnumpy==1\.", text)
    assert "\nnvidia-nvjitlink-cu12==12.1" in text


def test_the_cpu_flavour_holds_the_versions_of_the_development_environment():
    pins = {
        name: dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", path.read_text(), re.MULTILINE))
        for name, path in (
            ("image", apptainer.lock_file("cpu")),
            ("dev", shipped("requirements") / "lock.txt"),
        )
    }
    shared = set(pins["image"]) & set(pins["dev"])
    assert len(shared) > 100
    assert {n: pins["image"][n] for n in shared} == {n: pins["dev"][n] for n in shared}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("torch==2.4.1\n", "'torch==2.4.1' without"),
        (f"a==1 \\\n    --hash=sha256:{SHA}\nb>=2 \\\n    --hash=sha256:{SHA}\n", "'b>=2 "),
        (f"a==1 \\\n    --hash=sha256:{SHA}\n--index-url https://x\n", "names a place"),
    ],
)
def test_a_lock_file_with_a_hole_is_named(tmp_path, text, part):
    path = tmp_path / "lock.txt"
    path.write_text("# head\n" + text)
    with pytest.raises(KittyError, match=part):
        apptainer.check_lock(path)


def test_a_missing_image_and_an_unknown_flavour_are_named(tmp_path):
    for command in (apptainer.test, apptainer.labels, apptainer.sizes):
        with pytest.raises(KittyError, match="does not exist: build it"):
            command(tmp_path / "x.sif")
    with pytest.raises(KittyError, match="Flavour 'rocm' is not known: use cpu or cuda"):
        apptainer.build("rocm", tmp_path / "x.sif", None)


def test_without_apptainer_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(KittyError, match="apptainer was not found"):
        apptainer.build("cpu", tmp_path / "x.sif", None)


def test_the_definition_copies_every_part_that_the_code_looks_for():
    text = shipped("kitty.def").read_text()
    for part in ("Snakefile", "configs", "workflows", "patches", "tests", "src", "requirements"):
        assert re.search(rf"^    {part} /opt/kitty/{part}$", text, re.MULTILINE)
    stages = re.findall(r"^%arguments\n((?:    .*\n)+)", text, re.MULTILINE)
    defaults = [dict(re.findall(r"^    ([A-Z_]+)=(.*)$", stage, re.MULTILINE)) for stage in stages]
    assert len(defaults) == 2
    assert defaults[1].items() <= defaults[0].items()  # the same default in both stages
