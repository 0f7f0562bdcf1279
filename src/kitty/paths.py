"""Where the shipped configuration lies: in the checkout, or inside an installed wheel.

The wheel carries the one top-level copy of each folder as package data.
"""

from __future__ import annotations

from pathlib import Path

from kitty.errors import KittyError

_PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """A top-level file or folder of the project (``configs``, ``patches``, ``workflows`` …).

    Raises:
        KittyError: it is neither in the installed package nor beside it in a checkout.
    """
    for candidate in (_PACKAGE / name, _PACKAGE.parents[1] / name):
        if candidate.exists():
            return candidate
    raise KittyError(
        f"{name} is missing from this installation of kitty (looked beside {_PACKAGE}): reinstall "
        "the package."
    )


def configs_dir() -> Path:
    """The folder of configuration files."""
    return shipped("configs")
