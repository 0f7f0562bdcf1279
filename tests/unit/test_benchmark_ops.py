"""The benchmark's bookkeeping: bytes, percentiles, break-even, CSV; nothing is timed here."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from kitty.benchmark import ops
from kitty.benchmark.timing import percentiles
from kitty.errors import KittyError
from kitty.methods import get_method
from kitty.records import fault_of

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "h200"


def test_the_bytes_of_a_call_are_counted_by_hand() -> None:
    # 8191 tokens stand before the query: 63 key pages, 62 value pages
    pages = 63 * 5664 + 62 * 4608
    unpaged = (8192 - 63 * 128) + (8192 - 62 * 128)
    queries_and_outputs = 2 * 32 * 128 * 2
    expected = 8 * (pages + unpaged * 128 * 2) + queries_and_outputs
    assert ops.decode_bytes(get_method("kitty-pro"), [8192]) == expected
    assert ops.dense_bytes([8192]) == 8192 * 8 * 128 * 4 + queries_and_outputs


def test_percentiles_are_the_median_and_the_second_and_eighth_tenth() -> None:
    assert percentiles([float(x) for x in range(11)]) == (5.0, 2.0, 8.0)
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)


def _row(length: int, speedup: float, **changes: object) -> dict:
    row = dict.fromkeys(ops.COLUMNS)
    row |= {"op": "decode_attention", "implementation": "kitty", "batch": 1}
    return row | {"length": length, "speedup_over_sdpa": speedup} | changes


def test_break_even_is_where_kitty_stays_ahead() -> None:
    rows = [_row(1024, 1.1), _row(2048, 0.9), _row(4096, 1.0), _row(8192, 2.0)]
    rows.append(_row(16384, 0.5, implementation="three-kernels"))
    assert ops.break_even(rows, 1) == 4096
    assert ops.break_even([_row(1024, 0.9)], 1) is None
    assert ops.break_even(rows, 8) is None


def test_the_csv_has_a_line_for_each_row() -> None:
    text = ops.to_csv([_row(1024, 1.1), _row(2048, 0.9)])
    lines = list(csv.DictReader(text.splitlines()))
    assert [line["length"] for line in lines] == ["1024", "2048"]


def test_enough_copies_make_a_cold_cache() -> None:
    assert ops.copies_of(10**12) == 1
    assert ops.copies_of(2**30) == 1
    assert ops.copies_of(ops.COLD_BYTES // 4) == 4
    assert ops.copies_of(1) == 16


def test_the_command_on_record_is_the_one_to_type_and_names_no_folder_of_one_machine() -> None:
    typed = ops.command_line(Path("results/reference/h200"), quick=False, repeats=9)
    assert typed == "kitty bench ops --repeats 9 --out results/reference/h200"
    elsewhere = ops.command_line(Path("/scratch/one/two"), quick=True, repeats=2)
    assert elsewhere == "kitty bench ops --repeats 2 --quick"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_the_benchmark_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KittyError, match="No GPU"):
        ops.run(tmp_path, quick=True, repeats=1)
    assert ops.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_committed_times_come_from_the_record_beside_them(tmp_path: Path) -> None:
    record = json.loads((REFERENCE / "ops.json").read_text())
    assert fault_of(record) is None
    assert record["metrics"]["fall_backs"] == 0
    rows = [{name: row[name] for name in ops.COLUMNS} for row in record["metrics"]["rows"]]
    assert ops.to_csv(rows) == (REFERENCE / "ops.csv").read_text()
    for row in record["metrics"]["rows"]:
        assert percentiles(row["raw_us"])[0] == pytest.approx(row["median_us"], abs=1e-3)
    ops.plot(rows, tmp_path / "ops.png")
    assert (tmp_path / "ops.png").stat().st_size > 0
