#!/bin/sh
# What the image's %test checks, at the end of the build and by `apptainer test`.
#
#   test.sh cpu|cuda
set -eu
KITTY_STATE=$(mktemp -d) # at the end of a build the image could be written
trap 'rm -rf "$KITTY_STATE"' EXIT
. /opt/kitty/containers/environment.sh
kitty patch check | grep -q 'are applied'
python3 /opt/kitty/containers/check.py "$1"
snakemake --version
kitty methods > /dev/null
if [ "$1" = cuda ]; then
    gcc --version | head -n 1
fi
