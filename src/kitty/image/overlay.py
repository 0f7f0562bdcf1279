"""Overlays: an ext3 image that makes the read-only container image's caches last.

One instance at a time may write to one; any number may read it (`--overlay kitty.img:ro`), but not
while one writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from kitty.errors import KittyError
from kitty.image.apptainer import call

FOLDER = "/kitty"  # containers/environment.sh writes here where it is mounted
MIB = 2**20
LEAST_MIB = 64  # below it ext3's own tables and journal leave next to nothing
FULL = 0.05  # share of free space below which an overlay is called full
UNITS = {"M": 1, "G": 2**10, "T": 2**20}
# Superblock of ext2/3/4: at byte 1024, the magic number at 56 of it.
SUPERBLOCK, MAGIC_AT, MAGIC = 1024, 56, 0xEF53


@dataclass(frozen=True)
class Overlay:
    """What an overlay's file says.

    Attributes:
        size, free: bytes of its file system and of them free; of its last clean unmount.
        user: ``nobody``, ``readers``, or ``a writer``.
    """

    path: Path
    size: int
    free: int
    user: str

    @property
    def full(self) -> bool:
        """Whether next to nothing fits in."""
        return self.free < FULL * self.size


def parse_size(size: str) -> int:
    """A size such as ``512M`` or ``20G`` in MiB.

    Raises:
        KittyError: it is no size, or too small.
    """
    match = re.fullmatch(r"(\d+)([MGT])(i?B)?", size.strip(), re.IGNORECASE)
    if match is None:
        raise KittyError(f"Size {size!r} is not understood: give one such as 512M or 20G.")
    mebibytes = int(match[1]) * UNITS[match[2].upper()]
    if mebibytes < LEAST_MIB:
        raise KittyError(f"Size {size!r} is too small for an overlay: give at least {LEAST_MIB}M.")
    return mebibytes


def create(path: Path, size: str, *, sparse: bool = False) -> None:
    """Make an overlay whose folder /kitty belongs to the caller.

    Args:
        path: its file, which must not exist.
        size: such as ``20G``.
        sparse: take room on the disk only as it is filled.

    Raises:
        KittyError: the file exists, the disk has no room, or apptainer is missing or failed.
    """
    mebibytes = parse_size(size)
    if path.exists():
        raise KittyError(f"{path} exists already: name another file, or delete it first.")
    try:
        room = os.statvfs(path.absolute().parent)
    except OSError as error:
        raise KittyError(
            f"The overlay {path} cannot be written ({error.strerror}): name a file in a folder "
            "that exists."
        ) from error
    if not sparse and room.f_bavail * room.f_frsize < mebibytes * MIB:
        raise KittyError(
            f"There is no room for {size} in {path.absolute().parent}: ask for less, or use "
            "--sparse, which takes room as it is filled."
        )
    options = ["--sparse"] if sparse else []
    call(
        *("overlay", "create", *options, "--size", str(mebibytes)),
        *("--create-dir", FOLDER, str(path)),
    )


def status(path: Path) -> Overlay:
    """Size, free room and users of an overlay.

    Raises:
        KittyError: the file is missing or no overlay.
    """
    try:
        with path.open("rb") as file:
            file.seek(SUPERBLOCK)
            block = file.read(SUPERBLOCK)
            user = _user(file.fileno())
    except OSError as error:
        raise KittyError(f"The overlay {path} cannot be read: {error.strerror}.") from error
    if len(block) < SUPERBLOCK or struct.unpack_from("<H", block, MAGIC_AT)[0] != MAGIC:
        raise KittyError(
            f"{path} is no ext3 image: make an overlay with `kitty overlay create --size 20G`."
        )
    blocks, reserved, free = struct.unpack_from("<4xIII", block)
    block_size = 1024 << struct.unpack_from("<I", block, 24)[0]
    return Overlay(path, blocks * block_size, max(0, free - reserved) * block_size, user)


def require(path: Path, *, writing: bool) -> Overlay:
    """The status of an overlay that can be used now.

    Args:
        path: its file.
        writing: whether it is to be written.

    Raises:
        KittyError: it is busy or, for a writer, full.
    """
    found = status(path)
    if found.user == "a writer" or (writing and found.user == "readers"):
        raise KittyError(
            f"The overlay {path} is in use by {found.user}: wait until that ends"
            + (", or use another overlay." if writing else ", as reading needs it to be unchanged.")
        )
    if writing and found.full:
        raise KittyError(
            f"The overlay {path} is full ({found.free // MIB} of {found.size // MIB} MiB free): "
            "delete what is not needed in it, or make a larger one with `kitty overlay create`."
        )
    return found


def _user(handle: int) -> str:
    """Who holds Apptainer's lock on the file: it locks ranges of bytes, shared or exclusively."""
    question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(handle, fcntl.F_GETLK, question)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOLCK):  # a file system without locks
            return "nobody"
        raise
    kind = struct.unpack("hhqqi4x", answer)[0]
    return {fcntl.F_RDLCK: "readers", fcntl.F_WRLCK: "a writer"}.get(kind, "nobody")
