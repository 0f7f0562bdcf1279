"""What is said where no GPU can be used: without --nv, without a device, with an old driver."""

import ctypes

import pytest

from kitty.driver import examine_driver


class Library:
    """The three calls of libcuda that are asked, with answers of the test's own."""

    def __init__(self, version, devices=0, status=0):
        self.version, self.devices, self.status = version, devices, status

    def cuDriverGetVersion(self, where):
        where._obj.value = self.version
        return 0

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, where):
        where._obj.value = self.devices
        return 0


def missing(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("KITTY_IMAGE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_driver_of_cuda_12_1_with_two_gpus_has_no_problem(tmp_path):
    found = examine_driver(lambda name: Library(12010, devices=2), tmp_path / "none")
    assert (found.gpus, found.cuda, found.problem) == (2, (12, 1), None)


@pytest.mark.parametrize(("version", "named"), [(12000, "12.0"), (11080, "11.8"), (0, "0.0")])
def test_an_older_driver_is_named_with_what_is_needed(tmp_path, version, named):
    found = examine_driver(lambda name: Library(version, devices=1), tmp_path / "none")
    assert found.gpus == 0
    assert f"CUDA {named}" in found.problem
    assert "at least 12.1" in found.problem
    assert "update the NVIDIA driver" in found.problem


def test_a_machine_without_driver_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setenv("KITTY_IMAGE", "1")
    found = examine_driver(missing, tmp_path / "none")
    assert "no NVIDIA driver" in found.problem
    assert found.cuda is None


def test_an_image_started_without_nv_on_a_machine_with_a_driver_is_told_so(tmp_path, monkeypatch):
    note = tmp_path / "version"
    note.write_text("NVRM version")
    assert "no NVIDIA driver" in examine_driver(missing, note).problem
    monkeypatch.setenv("KITTY_IMAGE", "1")
    assert "--nv" in examine_driver(missing, note).problem


def test_hidden_devices_are_told_from_missing_ones(tmp_path, monkeypatch):
    def look():
        return examine_driver(lambda name: Library(12040, status=100), tmp_path / "none").problem

    assert "finds none" in look()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES is '7'" in look()


def test_another_error_of_the_driver_is_given_by_its_number(tmp_path):
    found = examine_driver(lambda name: Library(12040, status=999), tmp_path / "none")
    assert "error 999" in found.problem


def test_the_real_driver_or_its_absence_is_found_without_torch():
    found = examine_driver(ctypes.CDLL)
    assert (found.gpus > 0) == (found.problem is None)
