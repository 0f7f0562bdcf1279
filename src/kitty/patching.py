"""Apply, check and revert the patch series on an installed transformers.

Files are compared with the hashes in the package's own RECORD, so a changed one is never touched.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import patch_ng

from kitty.errors import KittyError
from kitty.paths import shipped
from kitty.records import write_atomically

PACKAGE = "transformers"
VERSION = "4.53.2"
APPLIED, PRISTINE = "applied", "not applied"


@dataclass(frozen=True)
class Installed:
    """The installed package.

    Attributes:
        site: folder that holds it.
        hashes: sha256 (urlsafe base64) of its files as released, by path below ``site``.
    """

    site: Path
    hashes: dict[str, str]

    @classmethod
    def find(cls) -> Installed:
        """The transformers that this Python imports.

        Raises:
            KittyError: it is missing, of another version, or was installed without its RECORD.
        """
        try:
            package = importlib.metadata.distribution(PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            raise KittyError(
                f"{PACKAGE} is not installed: install {PACKAGE}=={VERSION} first."
            ) from None
        if package.version != VERSION:
            raise KittyError(
                f"{PACKAGE} {package.version} is installed, but the patches are for {VERSION}: "
                f"install {PACKAGE}=={VERSION}, or use kitty.enable(), which needs no patch."
            )
        files = {str(f): f.hash.value for f in package.files or [] if f.hash is not None}
        site = Path(str(package.locate_file("")))
        if f"{PACKAGE}/__init__.py" not in files or not (site / PACKAGE).is_dir():
            raise KittyError(
                f"{PACKAGE} in {site} was not installed as a wheel, so its files cannot be "
                f"checked: install {PACKAGE}=={VERSION} from its wheel."
            )
        return cls(site, files)


def series() -> list[Path]:
    """The patches in order."""
    folder = shipped("patches") / f"{PACKAGE}-{VERSION}"
    return [folder / name for name in (folder / "series").read_text().split()]


def check() -> str:
    """``applied`` or ``not applied``.

    Raises:
        KittyError: a file is neither as released nor as patched.
    """
    installed = Installed.find()
    if not _changed(installed.site, installed):
        return PRISTINE
    with _scratch(installed) as copy:
        if _patch(copy, reverse=True) and not _changed(copy, installed):
            return APPLIED
    raise KittyError(
        f"{', '.join(_changed(installed.site, installed))} in {installed.site} is neither as "
        f"released nor as patched: reinstall {PACKAGE}=={VERSION}, then apply the patches."
    )


def apply() -> bool:
    """Patch the installed package; False if it was patched already.

    Raises:
        KittyError: it is not the released 4.53.2, or cannot be written.
    """
    return _switch(APPLIED, reverse=False)


def revert() -> bool:
    """Bring the released files back; False if they were not patched.

    Raises:
        KittyError: as for :func:`apply`.
    """
    return _switch(PRISTINE, reverse=True)


def _switch(wanted: str, *, reverse: bool) -> bool:
    if check() == wanted:
        return False
    installed = Installed.find()
    with _scratch(installed) as copy:
        if not _patch(copy, reverse=reverse):
            raise KittyError(f"The patches do not fit {PACKAGE} {VERSION}: reinstall kitty.")
        for name in _touched():
            try:
                write_atomically(installed.site / name, (copy / name).read_bytes())
            except OSError as error:
                raise KittyError(
                    f"{installed.site / name} cannot be written ({error.strerror}): use an "
                    "environment of your own, or kitty.enable(), which needs no patch."
                ) from error
    return True


def _touched() -> list[str]:
    """Files that the series changes, below the folder of installed packages."""
    names = {
        item.target.decode().removeprefix("b/").removeprefix("src/")
        for path in series()
        for item in patch_ng.fromfile(str(path)).items
    }
    return sorted(names)


def _changed(root: Path, installed: Installed) -> list[str]:
    """Touched files below ``root`` that are not as released."""
    return [name for name in _touched() if _sha256(root / name) != installed.hashes.get(name)]


def _sha256(path: Path) -> str | None:
    """In the form of a RECORD file; None for a missing file."""
    if not path.is_file():
        return None
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@contextmanager
def _scratch(installed: Installed) -> Iterator[Path]:
    """A copy of the touched files, so that a failure in the middle changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        for name in _touched():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (installed.site / name).is_file():
                shutil.copyfile(installed.site / name, target)
        yield Path(folder)


def _patch(root: Path, *, reverse: bool) -> bool:
    for path in reversed(series()) if reverse else series():
        patch = patch_ng.fromfile(str(path))
        step = patch.revert if reverse else patch.apply
        if not patch or not step(strip=1, root=str(root)):
            return False
    return True
