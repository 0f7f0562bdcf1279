"""Overlays from outside: sizes, the superblock, who uses the file, what is said otherwise."""

import fcntl
import os
import struct
import subprocess
import sys

import pytest

from kitty.errors import KittyError
from kitty.image import overlay

MIB = 2**20


def write_image(path, *, blocks=65536, reserved=0, free=32768, log_size=0):
    """An ext superblock by hand, after the on-disk layout: blocks of 1024 << log_size bytes."""
    block = bytearray(1024)
    struct.pack_into("<IIII", block, 0, 1000, blocks, reserved, free)
    struct.pack_into("<I", block, 24, log_size)
    struct.pack_into("<H", block, 56, 0xEF53)
    path.write_bytes(bytes(1024) + bytes(block))
    return path


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    [("64M", 64), ("512m", 512), ("20G", 20480), ("1T", 2**20), ("2GiB", 2048)],
)
def test_a_size_is_read_in_mebibytes(text, mebibytes):
    assert overlay.parse_size(text) == mebibytes


@pytest.mark.parametrize("text", ["", "20", "G", "-1G", "1.5G", "20K", "63M"])
def test_a_size_that_is_none_or_too_small_is_named(text):
    with pytest.raises(KittyError, match=f"'{text}'"):
        overlay.parse_size(text)


def test_size_and_free_room_come_from_the_superblock(tmp_path):
    found = overlay.status(write_image(tmp_path / "x.img"))
    assert (found.size, found.free, found.full) == (64 * MIB, 32 * MIB, False)
    large = write_image(tmp_path / "y.img", blocks=1000, reserved=50, free=80, log_size=2)
    found = overlay.status(large)
    assert (found.size, found.free, found.full) == (1000 * 4096, 30 * 4096, True)
    assert found.user == "nobody"


def test_a_file_that_is_no_overlay_is_named(tmp_path):
    path = tmp_path / "x.img"
    path.write_bytes(bytes(4096))
    with pytest.raises(KittyError, match="is no ext3 image"):
        overlay.status(path)
    path.write_bytes(b"")
    with pytest.raises(KittyError, match="is no ext3 image"):
        overlay.status(path)
    with pytest.raises(KittyError, match="cannot be read"):
        overlay.status(tmp_path / "none.img")


@pytest.mark.parametrize(
    ("kind", "user", "reading", "writing"),
    [("LOCK_EX", "a writer", False, False), ("LOCK_SH", "readers", True, False)],
)
def test_the_lock_of_another_process_says_who_uses_it(tmp_path, kind, user, reading, writing):
    path = write_image(tmp_path / "x.img")
    code = (
        "import fcntl, sys\n"
        f"file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.{kind})\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert overlay.status(path).user == user
        for wish, allowed in ((False, reading), (True, writing)):
            if allowed:
                overlay.require(path, writing=wish)
            else:
                with pytest.raises(KittyError, match=f"in use by {user}"):
                    overlay.require(path, writing=wish)
    finally:
        holder.communicate("")
    assert overlay.status(path).user == "nobody"
    overlay.require(path, writing=True)


def test_a_full_overlay_is_refused_to_a_writer_and_served_to_a_reader(tmp_path):
    path = write_image(tmp_path / "x.img", free=1000)
    overlay.require(path, writing=False)
    with pytest.raises(KittyError, match="is full \\(0 of 64 MiB free\\)"):
        overlay.require(path, writing=True)


def test_an_existing_file_is_never_overwritten(tmp_path):
    path = tmp_path / "x.img"
    path.write_text("mine")
    with pytest.raises(KittyError, match="exists already"):
        overlay.create(path, "64M")
    assert path.read_text() == "mine"


def test_without_apptainer_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KittyError, match="apptainer was not found"):
        overlay.create(tmp_path / "x.img", "64M", sparse=True)


def test_a_disk_without_room_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(KittyError, match="There is no room for 1000000G"):
        overlay.create(tmp_path / "x.img", "1000000G")
    assert not os.listdir(tmp_path)
    assert fcntl.F_WRLCK == 1  # the numbers that struct flock holds on Linux
