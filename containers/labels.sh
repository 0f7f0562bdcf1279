#!/bin/sh
# Labels that only the finished image knows: versions, and the lock file it was made of.
#
#   labels.sh cpu|cuda
set -eu
/opt/venv/bin/python3 - << 'P'
from importlib.metadata import version

for name in ("kitty", "torch", "triton", "transformers", "numpy", "snakemake", "lm-eval"):
    print(f"kitty.version.{name} {version(name)}")
P
echo "kitty.lock.sha256 $(sha256sum "/opt/kitty/requirements/image-$1.txt" | cut -d ' ' -f 1)"
