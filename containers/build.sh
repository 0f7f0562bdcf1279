#!/usr/bin/env bash
# Build the image: containers/build.sh cpu|cuda [IMAGE.sif]
#
# BASE        docker, debootstrap, or a SIF of Debian 12; default: docker where its registry answers, else
#             debootstrap where that is installed
# MIRROR      where debootstrap finds Debian (default: what this machine's apt uses)
# REUSE       an image built before, whose packages and model serve again where they are as locked, so
#             that a change of the code takes little time
# BUILD_ARGS  further arguments of `apptainer build`
#
# pip inside the build gets this machine's PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS (a folder)
# and PIP_CERT, so that a machine behind a mirror needs nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

flavour=${1:-}
image=${2:-kitty-$flavour.sif}
fail() {
    echo "kitty: error: $*" >&2
    exit 2
}
case $flavour in
    cpu | cuda) ;;
    *) fail "Flavour '$flavour' is not known: use cpu or cuda." ;;
esac
command -v apptainer > /dev/null ||
    fail "apptainer was not found, which builds and runs the image: install Apptainer 1.2 or newer."

choose_base() {
    if curl -s -o /dev/null --max-time 5 https://registry-1.docker.io/v2/; then
        echo docker
    elif command -v debootstrap > /dev/null; then
        echo debootstrap
    fi
}
base=${BASE:-$(choose_base)}
arguments=(--build-arg "FLAVOUR=$flavour")
# zstd at a quick level: half the time of packing for a few percent of size
pack=(--mksquashfs-args "-comp zstd -Xcompression-level 3")
case $base in
    docker) ;;
    debootstrap)
        mirror=${MIRROR:-$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 2> /dev/null |
            awk '$1 == "Debian" && !/security/ { print $2; exit }')}
        # once, and kept: both stages of every image start from it
        start=build/debian-12.sif
        if [ ! -f "$start" ] || [ containers/debian.def -nt "$start" ]; then
            echo "building $start" >&2
            [ -n "$mirror" ] || fail "apt of this machine names no Debian mirror: give its address with MIRROR=."
            mkdir -p build
            apptainer build --force "${pack[@]}" --build-arg "MIRROR=$mirror" "$start.new" containers/debian.def
            mv "$start.new" "$start"
        fi
        arguments+=(--build-arg BOOTSTRAP=localimage --build-arg "FROM=$start")
        ;;
    "") fail "No base can be reached: Docker's registry does not answer and debootstrap is not installed;" \
        "install debootstrap, or name a SIF of Debian 12 with BASE=." ;;
    *)
        [ -f "$base" ] || fail "The base image $base does not exist: use docker, debootstrap or a SIF file."
        arguments+=(--build-arg BOOTSTRAP=localimage --build-arg "FROM=$base")
        ;;
esac

pip_args=--retries=5
binds=()
[ -z "${PIP_INDEX_URL:-}" ] || pip_args+=" --index-url $PIP_INDEX_URL"
for index in ${PIP_EXTRA_INDEX_URL:-}; do pip_args+=" --extra-index-url $index"; done
if [ -d "${PIP_FIND_LINKS:-}" ]; then # /mnt and /media are there in every base
    binds+=("$PIP_FIND_LINKS:/mnt")
    pip_args+=" --find-links /mnt"
fi
if [ -f "${PIP_CERT:-}" ]; then
    binds+=("$(dirname "$PIP_CERT"):/media")
    pip_args+=" --cert /media/$(basename "$PIP_CERT")"
fi
arguments+=(--build-arg "PIP_ARGS=$pip_args")
if [ -n "${REUSE:-}" ]; then
    [ -f "$REUSE" ] || fail "The image $REUSE, to be reused, does not exist: name one that was built before."
    parts=$(mktemp -d)
    trap 'rm -rf "$parts"' EXIT
    apptainer exec "$REUSE" tar -C /opt -cf - venv kitty/cache | tar -C "$parts" -xf -
    binds+=("$parts:/srv")
fi
for bind in ${binds[@]+"${binds[@]}"}; do arguments+=(--bind "$bind"); done

if revision=$(git rev-parse HEAD 2> /dev/null); then
    [ -z "$(git status --porcelain --untracked-files=no)" ] || revision+=+dirty
    arguments+=(--build-arg "REVISION=$revision")
fi

echo "building $image ($flavour) on $base" >&2
# shellcheck disable=SC2086  # a list of arguments
apptainer build --force "${pack[@]}" \
    "${arguments[@]}" ${BUILD_ARGS:-} "$image" kitty.def
