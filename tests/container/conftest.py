"""The image, and the tiny experiment as it runs there, for all tests of this folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from container_image import Finished, Image, cached_image


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    if shutil.which("apptainer") is None:
        pytest.skip("Apptainer is not installed, so no image can be built or run")
    given = os.environ.get("KITTY_IMAGE")
    file = Path(given).absolute() if given else cached_image()
    return Image(file, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def finished(image, tmp_path_factory):
    folder, temporary = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("temporary")
    (temporary / "tmp").mkdir()
    (temporary / "var").mkdir()
    done = image.run(
        *("snakemake", "all", "--config", "experiment=tiny"),
        cwd=folder,
        # /tmp and /var/tmp are folders of this test's own; the working directory may lie in either
        options=(
            *("--bind", f"{temporary / 'tmp'}:/tmp", "--bind", f"{temporary / 'var'}:/var/tmp"),
            *("--bind", str(folder), "--pwd", str(folder)),
        ),
    )
    assert done.returncode == 0, done.stderr
    return Finished(folder, done, temporary)
