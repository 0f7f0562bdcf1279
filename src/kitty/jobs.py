"""The measuring jobs of the pipeline: load, measure, and give a record with its provenance.

The command line and the workflow both call these; each job is one process and one file.
"""

from __future__ import annotations

import datetime
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitty.environment import environment, peak_memory_bytes, revision
from kitty.methods import Method
from kitty.models import ModelSpec, describe_model, enough_memory, lean_imports, load_model
from kitty.records import SCHEMA_VERSION, Record
from kitty.texts import Passage, check_length

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int], None]
DEFAULT_TOKENS = 2176  # of a text where no number is asked for: sink, local window, 15 value pages


@dataclass(frozen=True)
class Setting:
    """What one job measures on.

    Attributes:
        spec: the model.
        passage: the text.
        tokens: leading tokens of the text that are used; None: DEFAULT_TOKENS, or fewer where the
            text or the model's positions end before.
        dtype: of the weights; None: the model's own.
        device: as for :func:`kitty.models.load_model`.
        experiment: name in the record.
    """

    spec: ModelSpec
    passage: Passage
    tokens: int | None = None
    dtype: str | None = None
    device: str = "cpu"
    experiment: str = "none"


def load(setting: Setting, method: Method) -> tuple[Any, Tensor]:
    """The model, and the token ids int64 ``[T]`` of the setting's text.

    Raises:
        KittyError: the model cannot be loaded, or the text is too short for the method.
    """
    lean_imports()
    model, tokenizer = load_model(source_of(setting.spec), setting.dtype, setting.device)
    return model, token_ids(tokenizer, setting, method, model.config)


def source_of(spec: ModelSpec) -> str:
    """The name under which :func:`load_model` finds a model again."""
    if spec.folder is not None:
        return str(spec.folder)
    return f"hub:{spec.hub}" if spec.hub is not None else spec.name


def token_ids(tokenizer: Any, setting: Setting, method: Method, config: Any = None) -> Tensor:
    """Leading token ids of a passage, int64 ``[T]``, without added special tokens.

    Raises:
        KittyError: the passage has fewer tokens than asked for, or too few for the method.
    """
    import torch

    ids = tokenizer(setting.passage.text, add_special_tokens=False)["input_ids"]
    check_length(len(ids), method, setting.passage.name, setting.tokens)
    positions = getattr(config, "max_position_embeddings", None) or DEFAULT_TOKENS
    ids = ids[: setting.tokens or min(DEFAULT_TOKENS, positions)]
    check_length(len(ids), method, setting.passage.name)
    return torch.tensor(ids, dtype=torch.int64)


def measure_reference(setting: Setting, method: Method, path: Path) -> None:
    """The 16-bit pass over a text, written to ``path``; ``method`` only gives the least length."""
    from kitty.evaluation import write_reference

    model, ids = load(setting, method)
    with enough_memory(setting.device, setting.spec.name):
        write_reference(model, ids, path)


def measure_quality(
    setting: Setting,
    method: Method,
    reference: Path,
    *,
    repeat: int = 0,
    progress: Progress | None = None,
) -> Record:
    """Quality of one method on one text against its reference pass, as a record."""
    from kitty.evaluation import Reference, evaluate_offline

    started = time.perf_counter()
    model, ids = load(setting, method)
    found = Reference.load(reference)
    # Bootstrap draws are the same for all methods, whatever their own seed is.
    with enough_memory(setting.device, setting.spec.name):
        result = evaluate_offline(model, ids, method, found, progress=progress)
    return finish("quality", setting, method, len(ids), result, started, repeat)


def measure_analysis(
    setting: Setting,
    method: Method,
    *,
    layer: int | None = None,
    progress: Progress | None = None,
) -> Record:
    """Channel analysis of a model on one text, as a record."""
    from kitty.analysis import analyze

    started = time.perf_counter()
    model, ids = load(setting, method)
    with enough_memory(setting.device, setting.spec.name):
        result = analyze(model, ids, method, map_layer=layer, progress=progress)
    return finish("analysis", setting, method, len(ids), result, started, 0)


def finish(
    kind: str,
    setting: Setting,
    method: Method,
    num_tokens: int,
    result: dict[str, Any],
    started: float,
    repeat: int,
) -> Record:
    """A record: the result together with everything that says where it comes from."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "experiment": setting.experiment,
        "command": shlex.join(["kitty", *sys.argv[1:]]),
        "model": describe_model(setting.spec, setting.dtype),
        "method": method.to_dict(),
        "passage": setting.passage.to_record(num_tokens),
        "repeat": repeat,
        "seed": method.seed,
        **result,
        "environment": environment(),
        "revision": revision(),
        "wall_time_s": round(time.perf_counter() - started, 3),
        "peak_memory_bytes": peak_memory_bytes(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
