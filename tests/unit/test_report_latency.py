"""Figure 5, break-even and their tables from synthetic latency records with numbers by hand."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from sample_records import latency_record, quality_record

from kitty.records import find_records, write_record
from kitty.redraw import Redraw
from kitty.report import latency, latency_files, write_html, write_latency
from kitty.report.files import latency_figures, latency_tables

SPEEDS = {
    "hf-dynamic": {8: 250.0, 16: 400.0, 32: None},
    "kitty-fp16": {8: 700.0, 16: 1200.0, 32: 1500.0, 64: None},
    "kitty-pro": {8: 500.0, 16: 1200.0, 32: 3000.0, 64: 4500.0, 128: 4000.0, 288: None},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("latency")
    for name, speeds in SPEEDS.items():
        for batch, speed in speeds.items():
            step = {"hf-dynamic": 40.0, "kitty-fp16": 20.0, "kitty-pro": 10.0}[name]
            record = latency_record(name, batch, speed, step_ms=step, peak=batch * 10**9)
            write_record(root / "records" / "latency" / name / f"b{batch}.json", record)
    return root


@pytest.fixture
def runs(folder):
    return latency.group(find_records(folder / "records"))


def test_the_best_table_compares_each_cache_with_the_16_bit_one_of_the_same_engine(runs) -> None:
    rows = {row["implementation"]: row for row in latency.best_table(runs).to_dict("records")}
    assert list(rows) == ["hf-dynamic", "kitty-fp16", "kitty-pro"]
    pro = rows["kitty-pro"]
    assert (pro["largest_batch"], pro["best_batch"], pro["best_tokens_per_s"]) == (128, 64, 4500.0)
    assert pro["batch_ratio"] == 4.0  # 128 / 32
    assert pro["speed_ratio"] == 3.0  # 4500 / 1500
    assert rows["hf-dynamic"]["batch_ratio"] == 0.5
    assert rows["kitty-fp16"]["speed_ratio"] == 1.0


def test_a_cache_that_never_fits_has_no_ratio() -> None:
    record = latency_record("kitty-pro", 8, None)
    (row,) = latency.best_table(latency.group([("x", record)])).to_dict("records")
    assert math.isnan(row["largest_batch"])
    assert math.isnan(row["batch_ratio"])


def test_the_csv_has_a_row_for_every_run_and_leaves_open_what_did_not_run(folder, tmp_path) -> None:
    write_latency(find_records(folder / "records"), tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "latency.csv").read_text())))
    assert len(rows) == sum(map(len, SPEEDS.values()))
    last = rows[-1]
    assert (last["implementation"], last["batch"], last["outcome"]) == (
        "kitty-pro",
        "288",
        "out of memory",
    )
    assert last["tokens_per_s"] == last["peak_gb"] == last["cache_ratio"] == ""
    first = rows[0]
    assert float(first["tokens_per_s"]) == 250.0
    assert float(first["peak_gb"]) == 8.0
    assert float(first["cache_ratio"]) == 5.0  # 5000 bytes in 16 bit, 600 + 400 held
    assert "–" in (tmp_path / "latency.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == set(latency_files())


def test_break_even_is_where_the_ratios_cross_one(runs) -> None:
    (by_name,) = runs.values()
    own = [latency.Pace.of(record) for record in latency.fitting(by_name["kitty-pro"])]
    pairs = latency._side_by_side(own, latency.fitting(by_name["kitty-fp16"]))
    batches, ratios = latency._speed_ratios(pairs)
    assert batches == [8, 16, 32]
    assert ratios == pytest.approx([500 / 700, 1.0, 2.0])
    lengths, ratios = latency._step_ratios(*pairs[0])
    assert lengths == [160, 4096, 8184]
    assert ratios == [2.0, 2.0, 2.0]  # 20 ms over 10 ms


def test_a_workload_of_one_batch_stands_in_the_table_and_has_no_panel(runs) -> None:
    (setting,) = runs
    lone = latency.Setting(setting.model, 8192, 100)
    both = runs | {lone: {"kitty-pro": [latency_record("kitty-pro", 264, 300.0)]}}
    for draw in (latency.draw_figure5, latency.draw_break_even):
        assert [axes.get_title() for axes in draw(both).axes] == [setting.title, ""]
    assert len(latency.latency_table(both)) == len(latency.latency_table(runs)) + 1
    alone = latency.draw_figure5({lone: both[lone]})  # better a point than nothing
    assert alone.axes[0].get_title() == lone.title


def test_labels_of_neighbouring_batches_do_not_overlap(runs) -> None:
    ((left, _),) = (latency.draw_figure5(runs).axes,)
    assert list(left.get_xticks()) == [8, 16, 32, 64, 128, 288]
    records = [latency_record("kitty-pro", batch, 1.0) for batch in (1, 64, 192, 256, 272, 288)]
    figure = latency.draw_figure5({next(iter(runs)): {"kitty-pro": records}})
    assert list(figure.axes[0].get_xticks()) == [1, 64, 288]


def test_between_two_batches_the_time_of_a_run_lies_on_a_straight_line() -> None:
    own = [
        latency.Pace.of(latency_record("kitty-pro", 16, 1600.0, step_ms=10.0)),  # 10 ms a token
        latency.Pace.of(latency_record("kitty-pro", 48, 2400.0, step_ms=20.0)),  # 20 ms
    ]
    others = [latency_record("hf-static", batch, 1000.0, step_ms=30.0) for batch in (8, 32, 64)]
    ((mine, other),) = latency._side_by_side(own, others)  # the others lie outside
    assert (mine.batch, mine.seconds, mine.times) == (32, 0.015, (15.0, 15.0, 15.0))
    assert latency._speed_ratios([(mine, other)]) == ([32], [pytest.approx(0.032 / 0.015)])
    assert latency._step_ratios(mine, other)[1] == [2.0, 2.0, 2.0]


def test_the_figures_are_the_same_bytes_every_time_and_not_blank(folder, tmp_path) -> None:
    records = list(find_records(folder / "records"))
    write_latency(records, tmp_path / "one")
    write_latency(reversed(records), tmp_path / "other")
    for name in latency_files():
        content = (tmp_path / "one" / name).read_bytes()
        assert content == (tmp_path / "other" / name).read_bytes()
        assert len(content) > (10_000 if name.endswith((".png", ".pdf")) else 100)


def test_the_report_shows_both_figures_of_latency_with_or_without_quality(folder, tmp_path) -> None:
    records = list(find_records(folder / "records"))
    alone = write_html(records, tmp_path / "alone.html").read_text()
    quality = [
        (tmp_path / f"{m}.json", quality_record(m, [0.1, 0.2])) for m in ("fp16", "kitty-pro")
    ]
    both = write_html(records + quality, tmp_path / "both.html").read_text()
    for text in (alone, both):
        assert "Memory and throughput by batch" in text
        assert text.count("data:image/png") >= 2
        assert "Break-even" in text
    assert 'id="summary"' not in alone
    assert 'id="summary"' in both


def test_committed_latency_records_are_drawn_again(folder, tmp_path) -> None:
    redraw = Redraw.load(folder, tmp_path)
    redraw.write_figures()
    redraw.write_tables()
    made = {path.name for path in (tmp_path / "redrawn").rglob("*") if path.is_file()}
    assert made == {*latency_figures(), *latency_tables()}
    assert json.dumps(redraw.figures() + redraw.tables()).count("latency/") == len(latency_files())
