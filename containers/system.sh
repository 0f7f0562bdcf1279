#!/bin/sh
# Debian's packages that the image needs at run time, by flavour.
set -eu

packages="python3 ca-certificates"
# Triton compiles a launcher for each kernel with gcc, against Python's and CUDA's headers; the compiled
# decode step takes g++.
[ "$1" = cuda ] && packages="$packages gcc g++ libc6-dev python3-dev"

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # a list
apt-get install -y -qq --no-install-recommends $packages > /dev/null
apt-get clean
rm -rf /var/lib/apt/lists/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/* /var/log/*.log
