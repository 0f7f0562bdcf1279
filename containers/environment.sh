# The environment of everything that runs in the image, and the one place that says where it writes.
# Sourced by a plain shell before each command, in the caller's directory.
#
# KITTY_STATE  folder of all that is neither code nor result: models and data sets of the hub, compiled
#              kernels, caches, temporary files. In this order:
#                what the caller's KITTY_STATE says;
#                /kitty, where a writable overlay of `kitty overlay create` is mounted;
#                .kitty in the working directory.
# A read-only overlay serves its hub models in place; its compiled kernels and data sets, whose libraries
# want to write beside them, are copied to KITTY_STATE once.

if [ -z "${KITTY_STATE:-}" ]; then
    if [ -d /kitty ] && [ -w /kitty ]; then
        KITTY_STATE=/kitty
    elif [ -w "$PWD" ]; then
        KITTY_STATE=$PWD/.kitty
    else # only commands that keep nothing, such as help, work from here
        KITTY_STATE=/tmp/kitty-$(id -u)
    fi
fi
export KITTY_STATE
mkdir -p "$KITTY_STATE" 2> /dev/null || true

export HF_HOME="$KITTY_STATE/huggingface"
export HF_HUB_CACHE="$HF_HOME/hub"
export HF_DATASETS_CACHE="$HF_HOME/datasets"
export HF_MODULES_CACHE="$HF_HOME/modules"
export NLTK_DATA="$KITTY_STATE/nltk"
export TRITON_CACHE_DIR="$KITTY_STATE/triton"
export TORCHINDUCTOR_CACHE_DIR="$KITTY_STATE/inductor"
export CUDA_CACHE_PATH="$KITTY_STATE/cuda"
export MPLCONFIGDIR="$KITTY_STATE/matplotlib"
export XDG_CACHE_HOME="$KITTY_STATE/cache"
export KITTY_CACHE="$KITTY_STATE/cache/kitty"
# A Unix socket in TMPDIR has 108 characters for its path.
if [ "${#KITTY_STATE}" -le 64 ] && mkdir -p "$KITTY_STATE/tmp" 2> /dev/null; then
    export TMPDIR="$KITTY_STATE/tmp"
fi

if [ -d /kitty ] && [ "$KITTY_STATE" != /kitty ]; then
    if [ -d /kitty/huggingface/hub ]; then
        export HF_HUB_CACHE=/kitty/huggingface/hub HF_HUB_OFFLINE=1
    fi
    for part in huggingface/datasets huggingface/modules nltk triton inductor; do
        if [ -d "/kitty/$part" ] && [ ! -e "$KITTY_STATE/$part" ]; then
            # by way of a rename: several commands may start at once
            mkdir -p "$(dirname "$KITTY_STATE/$part")"
            cp -r "/kitty/$part" "$KITTY_STATE/$part.$$" &&
                mv -T "$KITTY_STATE/$part.$$" "$KITTY_STATE/$part" 2> /dev/null ||
                rm -rf "$KITTY_STATE/$part.$$"
        fi
    done
    unset part
fi

# The image's own Python, whatever the host's settings are. (Apptainer forgets an unset.)
export PYTHONPATH= PYTHONHOME= PYTHONSTARTUP=
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export LC_ALL=C.UTF-8 MPLBACKEND=Agg
export PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export KITTY_MODELS=/opt/kitty/cache/models
export KITTY_IMAGE=1
