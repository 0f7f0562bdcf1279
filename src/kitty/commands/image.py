"""`kitty image` and `kitty overlay`: the container image and its overlays, from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

image_app = typer.Typer(
    no_args_is_help=True,
    help="The container image: build, test, measure, compare with its lock file.",
    epilog="Example: `kitty image build cpu`",
)
overlay_app = typer.Typer(
    no_args_is_help=True,
    help="Overlays, which keep the image's caches: hub models, data sets, compiled kernels.",
    epilog="Example: `kitty overlay create --size 20G kitty.img`",
)

ImageFile = Annotated[Path, typer.Argument(help="The image, a .sif file.")]
OverlayFile = Annotated[Path, typer.Argument(help="The overlay's file.")]
MEGABYTE = 10**6


@image_app.command(
    "build",
    epilog="Examples: `kitty image build cpu`, `kitty image build cuda --base debian-12.sif`",
)
def image_build(
    flavour: Annotated[str, typer.Argument(help="cpu or cuda.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Default: kitty-FLAVOUR.sif here.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", help="docker, debootstrap, or a SIF of Debian 12; default: what is reachable."
        ),
    ] = None,
) -> None:
    """Build the image from this checkout."""
    from kitty.image.apptainer import build

    raise typer.Exit(build(flavour, out or Path(f"kitty-{flavour}.sif"), base))


@image_app.command("test", epilog="Example: `kitty image test kitty-cpu.sif`")
def image_test(image: ImageFile) -> None:
    """Run the image's own tests: versions, patches, model."""
    from kitty.image.apptainer import test

    raise typer.Exit(test(image))


@image_app.command("size", epilog="Example: `kitty image size kitty-cpu.sif`")
def image_size(image: ImageFile) -> None:
    """Show what takes room in the image, and its labels."""
    from kitty.cli import show_table
    from kitty.image.apptainer import labels, sizes

    rows = [[name, f"{size / MEGABYTE:.0f}"] for name, size in sizes(image)]
    show_table(["part", "MB"], rows, "Size (the file is packed, its parts are not)")
    own = sorted((k, v) for k, v in labels(image).items() if k.startswith(("kitty.", "org.open")))
    show_table(["label", "value"], [list(pair) for pair in own], "Labels")


@image_app.command(
    "lock-check", epilog="Examples: `kitty image lock-check`, `kitty image lock-check kitty.sif`"
)
def image_lock_check(
    image: Annotated[
        Path | None, typer.Argument(help="An image to be compared with the lock file here.")
    ] = None,
) -> None:
    """Check that the lock files pin and hash everything, and that an image was made of them."""
    from kitty.cli import show_table
    from kitty.image.apptainer import FLAVOURS, check_image_lock, check_lock, lock_file, sha256

    if image is not None:
        found = check_image_lock(image)
        print(f"{image} holds what image-{found['flavour']}.txt pins (sha256 {found['sha256']}).")
        return
    rows = []
    for flavour in FLAVOURS:
        path = lock_file(flavour)
        rows.append([path.name, str(check_lock(path)), sha256(path)])
    show_table(["lock file", "packages", "sha256"], rows, "Lock files")


@overlay_app.command("create", epilog="Example: `kitty overlay create --size 20G kitty.img`")
def overlay_create(
    path: OverlayFile = Path("kitty.img"),
    size: Annotated[str, typer.Option("--size", help="Such as 512M or 20G.")] = "20G",
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Take room on the disk only as it is filled.")
    ] = False,
) -> None:
    """Make an overlay that the image writes its caches to."""
    from kitty.image.overlay import create

    create(path, size, sparse=sparse)
    print(f"{path}: fill it with `apptainer run --overlay {path} kitty.sif …`, read it with :ro")


@overlay_app.command("status", epilog="Example: `kitty overlay status kitty.img`")
def overlay_status(path: OverlayFile = Path("kitty.img")) -> None:
    """Show an overlay's size, free room, and whether an instance uses it."""
    from kitty.cli import show_table
    from kitty.image.overlay import MIB, status

    found = status(path)
    note = " (full)" if found.full else ""
    rows = [
        ["size", f"{found.size // MIB} MiB"],
        ["free", f"{found.free // MIB} MiB{note}"],
        ["used by", found.user],
    ]
    show_table([str(path), ""], rows, "Overlay")
