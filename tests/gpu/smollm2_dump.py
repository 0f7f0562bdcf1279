"""Queries, keys and values of eight layers of a real small model, and the kernels run on them.

python tests/gpu/smollm2_dump.py make                where transformers is; 31 MB, not committed
python tests/gpu/smollm2_dump.py check --out FILE    on a GPU: a record of every layer's error
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kitty.cache import PackedState
from kitty.methods import get_method
from kitty.ops.decode_attention.reference import decode_attention_reference
from kitty.pages import Buffers

MODEL, TEXT, TOKENS = "smollm2-135m-instruct", "python-data-model", 2048
LAYERS = tuple(range(0, 30, 4))
DUMP = Path(__file__).parent / "data" / "smollm2-qkv.safetensors"  # ignored by git
LENGTHS = (2048, 1500, 702, 161, 30)  # tokens of the sequences: prefixes of the text
METHODS = ("kitty-pro", "kitty", "kivi-k2v2", "kivi-k4v2-sink")


class LayerDump(NamedTuple):
    """One layer after RoPE: query ``[Hq, T, D]``, keys and values ``[H, T, D]``, fp16."""

    query: Tensor
    keys: Tensor
    values: Tensor


def make(path: Path = DUMP) -> Path:
    """Run the 16-bit model over the text and save what its attention saw."""
    from kitty.evaluation.reference import final_hidden
    from kitty.integrations.transformers import SimulatedCache
    from kitty.models import describe_model, find_model, load_model
    from kitty.records import write_atomically
    from kitty.texts import load_passage

    model, tokenizer = load_model(MODEL)
    passage = load_passage(TEXT)
    ids = torch.tensor(tokenizer(passage.text).input_ids[:TOKENS])
    tensors: dict[str, Tensor] = {}

    def note(layer: int, query: Tensor, keys: Tensor, values: Tensor, *args: object) -> None:
        if layer in LAYERS:
            for name, tensor in zip(LayerDump._fields, (query, keys, values), strict=True):
                tensors[f"{layer}.{name}"] = tensor[0].half().contiguous()

    with torch.inference_mode():
        final_hidden(model, ids, SimulatedCache("fp16", observer=note))
    metadata = {
        "model": json.dumps(describe_model(find_model(MODEL))),  # names the Q4_1 weights
        "passage": json.dumps({"name": passage.name, "sha256": passage.sha256, "tokens": TOKENS}),
    }
    write_atomically(path, safetensors.torch.save(tensors, metadata))
    return path


@functools.cache
def load(path: Path = DUMP) -> tuple[dict[int, LayerDump], dict[str, Any]]:
    """The layers by index, and what they came from."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items()}
        layers = {
            layer: LayerDump(*(file.get_tensor(f"{layer}.{x}") for x in LayerDump._fields))
            for layer in LAYERS
        }
    return layers, metadata


class Filled(NamedTuple):
    """A packed layer's state before a last call, and what the op gave for it."""

    arguments: tuple[Any, ...]  # of the op, in order
    out: Tensor
    written: list[Tensor]  # every part of all written pages


def fill(dump: LayerDump, name: str, device: str, last: int) -> Filled:
    """Prefill ragged prefixes of the text into one packed layer, then decode ``last`` tokens."""
    method = get_method(name)
    width = max(LENGTHS) - last
    batch = [x.new_zeros(len(LENGTHS), x.shape[0], width, x.shape[2]) for x in dump]
    real = torch.zeros(len(LENGTHS), width, dtype=torch.bool)
    steps = [x.new_empty(len(LENGTHS), x.shape[0], last, x.shape[2]) for x in dump]
    for b, length in enumerate(LENGTHS):
        real[b, width - (length - last) :] = True
        for source, padded, step in zip(dump, batch, steps, strict=True):
            padded[b, :, width - (length - last) :] = source[:, : length - last]
            step[b] = source[:, length - last : length]
    state = PackedState(method)
    layer = state.layer(0)
    scale = dump.query.shape[-1] ** -0.5
    state.begin(len(LENGTHS), width, real, dense_prefill=True)
    prompt = [x.to(device) for x in batch]
    layer.attend(*prompt, real.to(device), scale=scale)
    state.begin(len(LENGTHS), last, None, dense_prefill=True)
    query, keys, values = (x.to(device) for x in steps)
    out = layer.attend(query, keys, values, scale=scale)
    assert layer.buffers is not None
    tables = state.tables_on(torch.device(device))
    pages = state.pool.keys.storage(0), state.pool.values.storage(0)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    arguments = (query, *pages, *tables, Buffers(*layer.buffers), lengths)
    written = [
        part[[page for held in ids for page in held]]
        for ids, storage in zip((state.key_ids, state.value_ids), pages, strict=True)
        for part in storage
    ]
    return Filled(arguments, out, written)


def check_layer(layer: int, name: str, device: str, last: int = 1) -> dict[str, Any]:
    """Errors of the kernels on one dumped layer.

    Returns:
        Relative RMS error of decode attention against fp64 over the same pages, that of plain
        fp16 arithmetic, and whether the pages' bytes are those of the torch reference.
    """
    dump = load()[0][layer]
    method = get_method(name)
    found, right = fill(dump, name, device, last), fill(dump, name, "cpu", last)
    same = all(
        torch.equal(mine.cpu().contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
        for mine, want in zip(found.written, right.written, strict=True)
    )
    options = {
        "sink": method.sink,
        "window": method.window,
        "rollback": method.rollback,
        "softmax_scale": dump.query.shape[-1] ** -0.5,
    }
    exact, _ = decode_attention_reference(
        *found.arguments, **options, compute=torch.float64, decoded=torch.float64
    )
    plain, _ = decode_attention_reference(*found.arguments, **options, compute=torch.half)
    error, allowed = (
        ((x.double() - exact).norm() / exact.norm()).item() for x in (found.out, plain)
    )
    return {
        "layer": layer,
        "method": name,
        "query_tokens": last,
        "relative_rms": error,
        "relative_rms_plain_fp16": allowed,
        "bytes_equal_reference": same,
    }


def check(out: Path) -> int:
    """Write a record of all layers and methods; exit status 1 where one is off."""
    from kitty.environment import environment, revision
    from kitty.records import SCHEMA_VERSION, write_record

    _, origin = load()
    rows = [
        check_layer(layer, name, "cuda", last)
        for layer in LAYERS
        for name in METHODS
        for last in (1, 3)
    ]
    record = {
        "schema_version": SCHEMA_VERSION,
        "kind": "attention",
        "experiment": "none",
        "command": "python " + " ".join(sys.argv),
        "model": origin["model"],
        "metrics": {"rows": rows, "lengths": list(LENGTHS), "text": origin["passage"]},
        "environment": environment(),
        "revision": revision(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_record(out, record)
    off = [x for x in rows if not sound(x)]
    print(f"{len(rows) - len(off)} of {len(rows)} within the rule; record in {out}")
    return int(bool(off))


def sound(row: dict[str, Any]) -> bool:
    """At most twice the error of plain fp16, and the reference's bytes."""
    within = row["relative_rms"] <= 2.0 * row["relative_rms_plain_fp16"]
    return within and row["bytes_equal_reference"]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "check"])
    parser.add_argument("--out", type=Path, default=Path("smollm2-attention.json"))
    arguments = parser.parse_args()
    if arguments.what == "make":
        print(make())
        return 0
    return check(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
