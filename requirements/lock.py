"""Write requirements/lock.txt: every package of every extra, pinned, with the sha256 of its files.

Needs `uv` beside the running Python (`make lock` puts it in a folder of its own). Left out are
torch, triton and the CUDA libraries: which build of those is right depends on the machine, so the
Makefile installs torch by its pinned version first, then all else from this file with `--no-deps`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
LEFT_OUT = re.compile(r"^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
HEADER = """\
# Pinned versions and sha256 hashes of everything but torch, triton and the CUDA libraries.
# For Python 3.11 on Linux x86_64. Written by `make lock`; do not edit by hand.
"""


def blocks(text: str) -> list[str]:
    """The requirements of a compiled file, each with the hash lines that belong to it."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line[0].isspace():
            found[-1].append(line)
        else:
            found.append([line])
    return ["\n".join(lines) for lines in found]


def main() -> None:
    """Resolve, keep the versions of the present lock where they still fit, and replace it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("--torch", required=True, help="the pinned version of torch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        if LOCK.exists() and not arguments.upgrade:
            output.write_text(LOCK.read_text())
        pins = Path(folder) / "torch.txt"
        pins.write_text(f"torch=={arguments.torch}\n")
        command = [
            str(Path(sys.executable).with_name("uv")), "pip", "compile",
            str(ROOT / "pyproject.toml"),
            "--all-extras", "--generate-hashes", "--python-version", "3.11",
            "--python-platform", "x86_64-manylinux_2_28", "--constraint", str(pins),
            "--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links",
            "--no-config", "--quiet", "--output-file", str(output),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        kept = [block for block in blocks(output.read_text()) if not LEFT_OUT.match(block)]
    text = HEADER + "\n".join(kept) + "\n"
    if "://" in text:
        raise SystemExit("the resolved file holds a URL; not written")
    LOCK.write_text(text)
    print(f"{LOCK.relative_to(ROOT)}: {len(kept)} packages")


if __name__ == "__main__":
    main()
