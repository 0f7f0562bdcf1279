"""What a record says of the machine is read from the machine."""

import platform
import subprocess
import sys

import torch

from kitty import environment


def test_versions_are_those_of_the_running_packages():
    found = environment.environment()
    assert found["python"] == platform.python_version()
    # a wheel from PyPI does not say its build
    assert found["torch"] in (torch.__version__, torch.__version__.split("+")[0])
    assert found["threads"] == torch.get_num_threads()
    assert (found["gpu"] is None) == (not torch.cuda.is_available())


def test_an_absent_package_has_no_version():
    assert environment.package_version("no-such-package-at-all") is None


def test_the_revision_is_a_commit_or_a_version():
    revision = environment.revision()
    assert revision.startswith("kitty ") or len(revision.removesuffix("+dirty")) == 40


def test_peak_memory_is_that_of_the_process_alone():
    block = torch.ones(2**26)  # 256 MiB
    assert environment.peak_memory_bytes() > block.nbytes
    code = "from kitty.environment import peak_memory_bytes as p; print(p())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert 2**20 < int(child.stdout) < block.nbytes  # not inherited from this one
