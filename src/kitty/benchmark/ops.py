"""``kitty bench ops``: the ops' times against fp16 attention and the memory limit, on one GPU.

Correctness comes first: a wrong kernel is not timed. Every time is that of replayed CUDA graphs
over several copies of the data, so that caches are cold as in a model with many layers. Writes
ops.json (everything, raw repeats included), ops.csv and a figure.

    kitty bench ops --out results/reference/h200
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import io
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kitty.benchmark.timing import (
    Call,
    Replay,
    copy_bandwidth,
    count_launches,
    interleaved,
    percentiles,
)
from kitty.cache.packed import TORCH_GROUPS_HEADS
from kitty.environment import environment, revision
from kitty.errors import KittyError
from kitty.methods import Method, get_method
from kitty.ops import dispatch
from kitty.ops.append import append
from kitty.ops.decode_attention import decode_attention
from kitty.ops.decode_attention.reference import decode_attention_reference
from kitty.ops.dequantize_pages import dequantize_key_pages, dequantize_value_pages
from kitty.ops.quantize_pages import quantize_pages
from kitty.pages import (
    BufferLayout,
    Buffers,
    KeyPages,
    PageLayout,
    ValuePages,
    empty_buffers,
    empty_key_pages,
    empty_value_pages,
)
from kitty.records import SCHEMA_VERSION, write_atomically, write_record

DEVICE = "cuda"
HEADS, QUERY_HEADS, HEAD_DIM = 8, 32, 128
TOLERANCE = 2.0  # error against fp64, in errors of plain 16-bit arithmetic
COLD_BYTES = 4 * 60 * 2**20  # copies of the data together exceed the cache four times
MOST_BYTES = 24 * 2**30  # of one implementation's data
BATCHES = (1, 8, 64)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MOST_TOKENS = 64 * 16384
COLUMNS = (
    "op",
    "implementation",
    "method",
    "dtype",
    "batch",
    "length",
    "median_us",
    "p20_us",
    "p80_us",
    "bytes",
    "limit_us",
    "share_of_copy",
    "speedup_over_sdpa",
    "copies",
    "launches",
    "note",
)
GRAPHS = "CUDA graph replay, cold cache"
HEADS_NOTE = "enable_gqa=True" if TORCH_GROUPS_HEADS else "KV heads expanded beforehand"
SDPA_NOTE = f"torch scaled_dot_product_attention fp16, {HEADS_NOTE}; {GRAPHS}"


@dataclasses.dataclass
class Layer:
    """One layer's packed cache and a query, filled with random pages."""

    method: Method
    query: Tensor  # [B, Hq, 1, D]
    keys: KeyPages
    values: ValuePages
    key_table: Tensor
    value_table: Tensor
    buffers: Buffers
    seq_lens: Tensor

    def decode(self) -> Tensor:
        """The op that is timed."""
        out = decode_attention(
            self.query,
            self.keys,
            self.values,
            self.key_table,
            self.value_table,
            self.buffers,
            self.seq_lens,
            self.method,
        )
        assert isinstance(out, Tensor)
        return out

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Arguments of decode_attention in order."""
        tables = (self.key_table, self.value_table)
        return (self.query, self.keys, self.values, *tables, self.buffers, self.seq_lens)


def random_layer(
    method: Method, dtype: torch.dtype, lengths: Sequence[int], capacity: int, seed: int
) -> Layer:
    """A layer of sequences of ``lengths`` tokens, pages in arbitrary order.

    Codes are random bits; scales and zeros those of keys and values of unit size.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    layout, batch = PageLayout.of(method, HEAD_DIM), len(lengths)
    width = method.key_pages(capacity) + 1
    keys = empty_key_pages(layout, batch * width, HEADS, DEVICE)
    values = empty_value_pages(layout, batch * width, HEADS, DEVICE)
    for words in (keys.words, keys.high, values.words):
        words.random_(-(2**15), 2**15 - 1, generator=generator)
    for meta in (keys.meta, values.meta):
        meta[:, :, 0].uniform_(0.4, 1.2, generator=generator)
        meta[:, :, 1].uniform_(-2.0, -1.0, generator=generator)
    order = torch.rand(*keys.boosted.shape[:2], HEAD_DIM, device=DEVICE, generator=generator)
    chosen = order.argsort(-1)[..., : layout.num_boosted].sort(-1).values
    keys.boosted.copy_(chosen)
    buffers = empty_buffers(BufferLayout.of(method, HEAD_DIM), batch, HEADS, dtype, DEVICE)
    for buffer in buffers:
        buffer.normal_(generator=generator)
    key_table, value_table = (
        torch.randperm(batch * width, device=DEVICE, generator=generator)
        .to(torch.int32)
        .view(batch, width)
        for _ in range(2)
    )
    query = torch.randn(batch, QUERY_HEADS, 1, HEAD_DIM, device=DEVICE, generator=generator)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return Layer(method, query.to(dtype), keys, values, key_table, value_table, buffers, seq_lens)


def decode_bytes(method: Method, lengths: Sequence[int], item: int = 2) -> int:
    """Bytes that one call must read and write: pages, sinks, tails, query and output."""
    layout = PageLayout.of(method, HEAD_DIM)
    total = 0
    for length in lengths:
        key_pages, value_pages = method.key_pages(length - 1), method.value_pages(length - 1)
        total += key_pages * layout.key_page_bytes + value_pages * layout.value_page_bytes
        unpaged = 2 * length - (key_pages + value_pages) * method.page_size
        total += unpaged * HEAD_DIM * item
    return total * HEADS + 2 * len(lengths) * QUERY_HEADS * HEAD_DIM * item


def dense_bytes(lengths: Sequence[int]) -> int:
    """Bytes of fp16 attention."""
    queries = 2 * len(lengths) * QUERY_HEADS * HEAD_DIM * 2
    return sum(lengths) * HEADS * HEAD_DIM * 2 * 2 + queries


class Benchmark:
    """Rows of the CSV and the raw repeats behind them."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.rows: list[dict[str, Any]] = []
        self.raw: list[list[float]] = []
        self.bandwidth = copy_bandwidth()

    def add(self, times: list[float], num_bytes: int | None, **row: Any) -> dict[str, Any]:
        """One row from its repeats."""
        median, low, high = percentiles(times)
        limit = None if num_bytes is None else num_bytes / self.bandwidth * 1e6
        row = {
            "median_us": round(median, 3),
            "p20_us": round(low, 3),
            "p80_us": round(high, 3),
            "bytes": num_bytes,
            "limit_us": None if limit is None else round(limit, 3),
            "share_of_copy": None if limit is None else round(limit / median, 4),
            **row,
        }
        self.rows.append({column: row.get(column) for column in COLUMNS})
        self.raw.append([round(time, 4) for time in times])
        print(
            f"{row['op']:16} {row['implementation']:22} {row['batch']:>3} x {row['length']:<7}"
            f"{median:10.2f} µs" + ("" if limit is None else f"  {limit / median:6.1%} of copy"),
            flush=True,
        )
        return self.rows[-1]


def copies_of(num_bytes: int) -> int:
    """Copies of the data that make every call's cache cold, within the memory allowed."""
    return max(1, min(-(-COLD_BYTES // num_bytes), MOST_BYTES // num_bytes, 16))


def sdpa_calls(lengths: Sequence[int], capacity: int) -> list[Call]:
    """fp16 attention of torch over dense keys and values, padded to the longest sequence.

    A torch without enable_gqa reads every KV head once for each of its query heads.
    """
    batch = len(lengths)
    heads = HEADS if TORCH_GROUPS_HEADS else QUERY_HEADS
    copies = copies_of(batch * capacity * heads * HEAD_DIM * 4)
    calls: list[Call] = []
    for _ in range(copies):
        q = torch.randn(batch, QUERY_HEADS, 1, HEAD_DIM, dtype=torch.half, device=DEVICE)
        k, v = torch.randn(2, batch, heads, capacity, HEAD_DIM, dtype=torch.half, device=DEVICE)
        calls.append(_sdpa(q, k, v))
    return calls


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Call:
    options: dict[str, Any] = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    return lambda: F.scaled_dot_product_attention(q, k, v, **options)


def kitty_calls(method: Method, dtype: torch.dtype, lengths: Sequence[int]) -> list[Call]:
    """decode_attention on as many layers as make the cache cold."""
    copies = copies_of(decode_bytes(method, lengths))
    layers = [random_layer(method, dtype, lengths, max(lengths), i) for i in range(copies)]
    return [layer.decode for layer in layers]


def three_kernel_calls(method: Method, length: int, batch: int) -> list[Call]:
    """The paper's form over the full pages alone."""
    from kitty.benchmark.three_kernels import three_kernel_attention

    calls: list[Call] = []
    pages = method.key_pages(length - 1)
    for i in range(copies_of(decode_bytes(method, [length] * batch))):
        layer = random_layer(method, torch.half, [length] * batch, length, i)
        tables = [t[:, :pages].contiguous() for t in (layer.key_table, layer.value_table)]
        scores = torch.empty(
            batch, QUERY_HEADS, pages * method.page_size, dtype=torch.half, device=DEVICE
        )

        def call(
            layer: Layer = layer, tables: list[Tensor] = tables, scores: Tensor = scores
        ) -> Tensor:
            query = layer.query[:, :, 0]
            return three_kernel_attention(
                query, layer.keys, layer.values, tables[0], tables[1], scores, HEAD_DIM**-0.5
            )

        calls.append(call)
    return calls


def gate() -> None:
    """Compare the kernels with the references on small ragged data.

    Raises:
        KittyError: an op is wrong.
    """
    for name, dtype in (("kitty-pro", torch.half), ("kitty", torch.half), ("k2v2", torch.half)):
        _gate_decode(benchmark_method(name), dtype)
    _gate_decode(benchmark_method("kitty-pro"), torch.bfloat16)
    _gate_pages()


def benchmark_method(name: str) -> Method:
    """Methods by the benchmark's names; k2v2 keeps a sink, so that the 16-bit tokens are equal."""
    return get_method("kivi-k2v2-sink" if name == "k2v2" else name)


def _gate_decode(method: Method, dtype: torch.dtype) -> None:
    lengths = (1, 40, 700, 1500)
    layer = random_layer(method, dtype, lengths, 1500, 0)
    options: dict[str, Any] = {
        "sink": method.sink,
        "window": method.window,
        "rollback": method.rollback,
        "softmax_scale": HEAD_DIM**-0.5,
    }
    exact, _ = decode_attention_reference(
        *layer.tensors, **options, compute=torch.float64, decoded=torch.float64
    )
    plain, _ = decode_attention_reference(*layer.tensors, **options, compute=dtype)
    error, allowed = (((x.double() - exact).norm() / exact.norm()) for x in (layer.decode(), plain))
    print(f"gate: decode_attention {method.name} {dtype}: error {error:.2e}, plain {allowed:.2e}")
    if not error <= TOLERANCE * allowed:
        raise KittyError(
            f"decode_attention of {method.name} is off by {error:.2e}, more than {TOLERANCE} times "
            f"the {allowed:.2e} of plain 16-bit arithmetic: nothing was timed."
        )


def _gate_pages() -> None:
    """quantize_pages on the GPU against the reference on the CPU, decoded: equal bits."""
    method = get_method("kitty-pro")
    k, v = torch.randn(2, 2, HEADS, 500, HEAD_DIM, dtype=torch.half)
    decoded = []
    for device in ("cpu", DEVICE):
        layer = random_layer(method, torch.half, (500, 500), 500, 0)
        keys = KeyPages(*(part.to(device) for part in layer.keys))
        values = ValuePages(*(part.to(device) for part in layer.values))
        key_table, value_table = layer.key_table[:, :3], layer.value_table[:, :2]
        tables = key_table.to(device), value_table.to(device)
        lens = layer.seq_lens.to(device)
        quantize_pages(k.to(device), v.to(device), keys, values, *tables, lens, method)
        decoded += [
            dequantize_key_pages(keys, tables[0], torch.half).cpu(),
            dequantize_value_pages(values, tables[1], torch.half).cpu(),
        ]
    if not (torch.equal(decoded[0], decoded[2]) and torch.equal(decoded[1], decoded[3])):
        raise KittyError("quantize_pages on the GPU differs from its reference: nothing was timed.")


def bench_decode(bench: Benchmark, batches: Sequence[int], lengths: Sequence[int]) -> None:
    """Kitty-Pro against fp16 attention over batch sizes and lengths."""
    method = get_method("kitty-pro")
    for batch in batches:
        for length in lengths:
            if batch * length > MOST_TOKENS:
                continue
            calls = {
                "sdpa-fp16": sdpa_calls([length] * batch, length),
                "kitty": kitty_calls(method, torch.half, [length] * batch),
            }
            if batch * length in (8192, 64 * 8192):
                calls["three-kernels"] = three_kernel_calls(method, length, batch)
            _timed_decode(bench, calls, method, [length] * batch)
            del calls
            torch.cuda.empty_cache()


def _timed_decode(
    bench: Benchmark, calls: dict[str, list[Call]], method: Method, lengths: Sequence[int]
) -> None:
    """One row for each implementation of attention."""
    times = interleaved({name: Replay(c) for name, c in calls.items()}, bench.repeats)
    sdpa = percentiles(times["sdpa-fp16"])[0]
    notes = {"sdpa-fp16": SDPA_NOTE, "three-kernels": f"full pages only; {GRAPHS}"}
    for name, series in times.items():
        dense = name == "sdpa-fp16"
        bench.add(
            series,
            dense_bytes(lengths) if dense else decode_bytes(method, lengths),
            op="decode_attention",
            implementation=name,
            method="fp16" if dense else method.name,
            dtype="float16",
            batch=len(lengths),
            length=max(lengths),
            speedup_over_sdpa=round(sdpa / percentiles(series)[0], 4),
            copies=len(calls[name]),
            launches=count_launches(calls[name][0]),
            note=notes.get(name, GRAPHS),
        )


def bench_methods(bench: Benchmark, batch: int = 64, length: int = 8192) -> None:
    """Methods and dtypes side by side, and a ragged batch, interleaved in one run."""
    lengths = [length] * batch
    ragged = [length - (i * 4096) // batch for i in range(batch)]
    cases: list[tuple[str, Method, torch.dtype, list[int]]] = [
        ("kitty-pro", benchmark_method("kitty-pro"), torch.half, lengths),
        ("kitty", benchmark_method("kitty"), torch.half, lengths),
        ("k2v2", benchmark_method("k2v2"), torch.half, lengths),
        ("kitty-pro bf16", benchmark_method("kitty-pro"), torch.bfloat16, lengths),
        ("kitty-pro ragged", benchmark_method("kitty-pro"), torch.half, ragged),
    ]
    calls = {name: kitty_calls(method, dtype, n) for name, method, dtype, n in cases}
    times = interleaved({name: Replay(c) for name, c in calls.items()}, bench.repeats)
    for name, method, dtype, n in cases:
        note = f"lengths {min(n)} to {max(n)}; {GRAPHS}" if n is ragged else GRAPHS
        bench.add(
            times[name],
            decode_bytes(method, n),
            op="decode_methods",
            implementation=name,
            method=method.name,
            dtype=str(dtype).removeprefix("torch."),
            batch=batch,
            length=length,
            copies=len(calls[name]),
            launches=count_launches(calls[name][0]),
            note=note,
        )


def bench_append(bench: Benchmark, batch: int = 64) -> None:
    """Time of append amortized over the steps of a page, in one of which both pages fall due."""
    method = get_method("kitty-pro")
    size = method.page_size
    start = method.sink + method.window + 3 * size
    layers = [random_layer(method, torch.half, [start] * batch, start + size, i) for i in range(2)]
    k, v = torch.randn(2, batch, HEADS, 1, HEAD_DIM, dtype=torch.half, device=DEVICE)
    steps = torch.arange(size, dtype=torch.int32, device=DEVICE)[:, None] + start + 1
    seq_lens = steps.expand(-1, batch).contiguous()  # [G, B], lengths after each step
    paged_lens = seq_lens - 2
    paged_lens[0] = start - 1

    def step(i: int) -> Call:
        layer = layers[i % 2]
        arguments = (layer.keys, layer.values, layer.key_table, layer.value_table, layer.buffers)
        return lambda: append(k, v, *arguments, seq_lens[i], paged_lens[i], method)

    calls = [step(i) for i in range(size)]
    times = interleaved({"append": Replay(calls)}, bench.repeats)["append"]
    layout = PageLayout.of(method, HEAD_DIM)
    pages = 2 * size * HEAD_DIM * 2 + layout.key_page_bytes + layout.value_page_bytes
    moved = batch * HEADS * (4 * HEAD_DIM * 2 + pages / size)
    bench.add(
        times,
        round(moved),
        op="append",
        implementation="kitty",
        method=method.name,
        dtype="float16",
        batch=batch,
        length=start,
        copies=2,
        launches=count_launches(calls[1]),
        note=f"mean of the {size} steps of a page; {GRAPHS}",
    )


def bench_pages(bench: Benchmark, batch: int = 64, length: int = 8192) -> None:
    """quantize_pages and dequantize_pages on a prefill's keys and values."""
    method = get_method("kitty-pro")
    layer = random_layer(method, torch.half, [length] * batch, length, 0)
    k, v = (
        torch.randn(batch, length, HEADS, HEAD_DIM, dtype=torch.half, device=DEVICE)
        for _ in range(2)
    )
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    tables = layer.key_table, layer.value_table
    key_pages, value_pages = method.key_pages(length), method.value_pages(length)
    key_table, value_table = tables[0][:, :key_pages], tables[1][:, :value_pages]
    calls: dict[str, Callable[[], object]] = {
        "quantize_pages": lambda: quantize_pages(
            k, v, layer.keys, layer.values, *tables, layer.seq_lens, method
        ),
        "dequantize_pages": lambda: (
            dequantize_key_pages(layer.keys, key_table, torch.half),
            dequantize_value_pages(layer.values, value_table, torch.half),
        ),
    }
    layout, dense = PageLayout.of(method, HEAD_DIM), 2 * method.page_size * HEAD_DIM
    moved = key_pages * (dense + layout.key_page_bytes)
    moved += value_pages * (dense + layout.value_page_bytes)
    for name, call in calls.items():
        bench.add(
            interleaved({name: Replay([call])}, bench.repeats)[name],
            moved * batch * HEADS,
            op=name,
            implementation="kitty",
            method=method.name,
            dtype="float16",
            batch=batch,
            length=length,
            copies=1,
            launches=count_launches(call),
            note=GRAPHS,
        )


def break_even(rows: Sequence[dict[str, Any]], batch: int) -> int | None:
    """Least measured length from which Kitty is no slower than fp16 attention, up to the last."""
    speed = {
        row["length"]: row["speedup_over_sdpa"]
        for row in rows
        if row["op"] == "decode_attention"
        and row["implementation"] == "kitty"
        and row["batch"] == batch
    }
    found = None
    for length in sorted(speed, reverse=True):
        if speed[length] < 1.0:
            break
        found = length
    return found


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time against length, one panel a batch size, with the break-even length and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row["op"] == "decode_attention"]
    batches = sorted({row["batch"] for row in rows})
    figure, axes = plt.subplots(1, len(batches), figsize=(3.6 * len(batches), 3.2), squeeze=False)
    styles = (("sdpa-fp16", "fp16 SDPA", "#555555"), ("kitty", "Kitty-Pro", "#0072b2"))
    for axis, batch in zip(axes[0], batches, strict=True):
        for name, label, colour in styles:
            mine = [r for r in rows if r["batch"] == batch and r["implementation"] == name]
            lengths = [row["length"] for row in mine]
            axis.plot(lengths, [row["median_us"] for row in mine], "o-", color=colour, label=label)
            limits = [row["limit_us"] for row in mine]
            axis.plot(lengths, limits, ":", color=colour, label=f"{label}, byte limit")
        length = break_even(rows, batch)
        if length is not None:
            axis.axvline(length, color="#d55e00", linewidth=0.8, label=f"break-even ≤ {length}")
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"{batch} sequences")
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("µs a layer")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def command_line(out: Path, *, quick: bool, repeats: int) -> str:
    """The command as a user types it; a folder of one machine alone is left out."""
    words = ["kitty", "bench", "ops", "--repeats", str(repeats)]
    words += ["--quick"] if quick else []
    words += [] if out.is_absolute() else ["--out", out.as_posix()]
    return shlex.join(words)


def run(out: Path, *, quick: bool, repeats: int, commit: str | None = None) -> int:
    """Gate, measure, write; returns the exit code.

    Raises:
        KittyError: no GPU, or a wrong kernel.
    """
    if not torch.cuda.is_available():
        raise KittyError("No GPU was found: kitty bench ops times kernels and needs one.")
    gate()
    dispatch.calls.clear()
    bench = Benchmark(repeats)
    print(f"copy bandwidth {bench.bandwidth / 1e12:.3f} TB/s")
    bench_decode(bench, BATCHES, (1024, 8192) if quick else LENGTHS)
    bench_methods(bench)
    bench_append(bench)
    bench_pages(bench)
    calls = dict(dispatch.calls)
    record = {
        "schema_version": SCHEMA_VERSION,
        "kind": "ops",
        "experiment": "ops",
        "command": command_line(out, quick=quick, repeats=repeats),
        "metrics": {
            "copy_bandwidth_bytes_per_s": round(bench.bandwidth),
            "rows": [row | {"raw_us": raw} for row, raw in zip(bench.rows, bench.raw, strict=True)],
            "break_even_length": {str(b): break_even(bench.rows, b) for b in BATCHES},
            "op_calls": calls,
            "fall_backs": calls.get("reference", 0),
        },
        "environment": environment(),
        "revision": commit or revision(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_record(out / "ops.json", record)
    write_atomically(out / "ops.csv", to_csv(bench.rows).encode())
    for suffix in ("pdf", "png"):
        plot(bench.rows, out / f"ops.{suffix}")
    if calls.get("reference"):
        print(f"{calls['reference']} calls fell back to the torch reference.", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``python -m kitty.benchmark.ops``."""
    parser = argparse.ArgumentParser(prog="kitty bench ops", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/ops"), help="output folder")
    parser.add_argument("--quick", action="store_true", help="two lengths only")
    parser.add_argument("--repeats", type=int, default=15, help="timed replays of each graph")
    parser.add_argument("--commit", help="revision to record where no git checkout is")
    parsed = parser.parse_args(arguments)
    try:
        return run(parsed.out, quick=parsed.quick, repeats=parsed.repeats, commit=parsed.commit)
    except KittyError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
