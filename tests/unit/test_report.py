"""Tables, figures and the report from synthetic records with numbers chosen by hand."""

import csv
import io
import re

import numpy as np
import pytest
from PIL import Image
from sample_records import quality_record

from kitty.errors import KittyError
from kitty.evaluation.bootstrap import Interval
from kitty.methods import get_method
from kitty.records import find_records, write_record
from kitty.report import (
    figure_files,
    load_results,
    table_files,
    write_figures,
    write_html,
    write_tables,
)
from kitty.report.data import identity
from kitty.report.figures import DRAWERS, boost_sweeps, render
from kitty.report.files import FIGURES, TABLES
from kitty.report.orderings import expected_orderings, verdict
from kitty.report.tables import (
    BUILDERS,
    differences_table,
    orderings_table,
    quality_table,
    summary_table,
    to_csv,
    to_latex,
    to_markdown,
)

# Page means of the KL divergence by method, the same shape on both texts.
KL = {
    "fp16": 0.0,
    "kivi-k4v4": 0.01,
    "kivi-k2v2": 0.5,
    "kivi-k2v2-sink": 0.36,
    "kivi-k2v4-sink": 0.31,
    "kivi-k4v2-sink": 0.02,
    "kitty": 0.11,
    "kitty-pro": 0.06,
    "kitty-12.5-random": 0.3,
    "kitty-25-random": 0.24,
    "kitty-12.5-variance": 0.2,
}


def analysis_record(passage="first", model="small"):
    record = quality_record("kitty-pro", [0.1, 0.1], passage=passage, model=model)
    summary = {
        "overlap": 0.7,
        "overlap_query_heads": 0.6,
        "captured": 0.8,
        "captured_best": 0.9,
        "jaccard_consecutive": 0.5,
        "jaccard_first": 0.4,
        "overlap_chance": 0.25,
        "jaccard_chance": 0.15,
    }
    grid = 1 + np.arange(2 * 3 * 8).reshape(2, 3, 8)
    record |= {
        "kind": "analysis",
        "metrics": summary,
        "analysis": {
            "layers": [{"layer": i, **summary} for i in range(4)],
            "maps": {
                "layer": 2,
                "magnitude": grid.tolist(),
                "sensitivity": grid[:, :2].reshape(4, 8).tolist(),
                "boosted": [[[0, 1], [0, 2], [0, 3]], [[6, 7], [6, 7], [6, 7]]],
            },
        },
    }
    del record["pages"]
    return record


def fill(folder, kl=KL, passages=("first", "second"), models=("small",), analysis=True):
    for model in models:
        for passage in passages:
            for name, level in kl.items():
                # a page twice as hard as another one, the same pages for all methods
                record = quality_record(name, [level, 2 * level], passage=passage, model=model)
                write_record(folder / "quality" / model / passage / name / "r0.json", record)
            if analysis:
                record = analysis_record(passage, model)
                write_record(folder / "analysis" / model / f"{passage}.json", record)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("results") / "records")


@pytest.fixture(scope="module")
def results(folder):
    return load_results(folder)


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_quality_csv_has_one_row_per_text_and_method_in_the_order_of_the_methods_file(results):
    table = rows(to_csv(quality_table(results)))
    assert len(table) == 2 * len(KL)
    assert [row["method"] for row in table[:8]] == list(KL)[:8]
    row = next(r for r in table if r["method"] == "kitty" and r["passage"] == "second")
    assert row["model"] == "small"
    assert row["title"] == "Kitty"
    assert row["kl"] == "0.16500"  # mean of 0.11 and 0.22
    assert (row["kl_low"], row["kl_high"]) == ("0.11000", "0.22000")  # two pages: both alike
    assert (row["nll"], row["top1"]) == ("2.00000", "0.50000")
    assert row["tokens"] == "257"
    assert row["bits"] == "2.50391"  # (2 + 0.25 + 0.25 + 1/128 and 2 + 0.5) / 2 at head_dim 64
    assert row["attention_error"] == "0.15000"


def test_the_summary_weighs_texts_by_their_tokens(tmp_path):
    write_record(tmp_path / "a.json", quality_record("kitty", [0.1, 0.1], passage="short"))
    write_record(tmp_path / "b.json", quality_record("kitty", [0.4] * 4, passage="long"))
    (row,) = rows(to_csv(summary_table(load_results(tmp_path))))
    assert row["passage"] == "all"
    assert row["kl"] == "0.30000"
    assert row["tokens"] == str(257 + 513)


def test_repeats_are_averaged_page_by_page(tmp_path):
    for repeat, level in enumerate([0.1, 0.3]):
        record = quality_record("kitty-25-random", [level, 2 * level], repeat=repeat)
        write_record(tmp_path / f"r{repeat}.json", record)
    (row,) = rows(to_csv(quality_table(load_results(tmp_path))))
    assert (row["repeats"], row["kl"]) == ("2", "0.30000")
    assert (row["kl_low"], row["kl_high"]) == ("0.20000", "0.40000")


def test_differences_pair_each_method_with_the_next_better_one(results):
    table = rows(to_csv(differences_table(results)))
    assert [row["first"] for row in table][:3] == ["kivi-k2v2", "kivi-k2v2-sink", "kivi-k2v4-sink"]
    assert "fp16" not in {row["second"] for row in table}
    row = table[0]
    assert row["second"] == "kivi-k2v2-sink"
    assert row["kl_difference"] == "0.21000"  # (0.14 + 0.28) / 2
    # four pages, two per text, drawn within texts: the extreme draws are 1 in 16 each
    assert (row["kl_difference_low"], row["kl_difference_high"]) == ("0.14000", "0.28000")
    assert row["kl_excludes_zero"] == "True"
    assert (row["nll_difference"], row["nll_excludes_zero"]) == ("0.00000", "False")


def test_every_expected_ordering_is_judged_over_all_texts_and_on_each(results):
    table = rows(to_csv(orderings_table(results)))
    pairs = [(r["worse"], r["better"]) for r in table if r["passage"] == "all"]
    assert pairs == [
        ("kivi-k2v2", "kivi-k2v2-sink"),
        ("kivi-k2v2-sink", "kitty"),
        ("kitty", "kitty-pro"),
        ("kitty-pro", "kivi-k4v4"),
        ("kivi-k2v4-sink", "kivi-k4v2-sink"),
        ("kitty-12.5-random", "kitty"),
        ("kitty-25-random", "kitty-pro"),
    ]
    assert {row["verdict"] for row in table} == {"holds"}
    assert len(table) == 3 * len(pairs)


def test_a_reversed_and_an_open_ordering_are_said_to_be_so(tmp_path):
    fill(tmp_path, {"kivi-k2v2-sink": 0.1, "kitty": 0.3, "kitty-pro": 0.3}, analysis=False)
    table = orderings_table(load_results(tmp_path))
    verdicts = dict(zip(table["better"], table["verdict"], strict=True))
    assert verdicts == {"kitty": "reversed", "kitty-pro": "unresolved"}


@pytest.mark.parametrize(
    "interval,expected",
    [
        (Interval(0.2, 0.1, 0.3), "holds"),
        (Interval(0.2, -0.1, 0.3), "unresolved"),
        (Interval(-0.2, -0.3, 0.1), "unresolved"),
        (Interval(-0.2, -0.3, -0.1), "reversed"),
    ],
)
def test_the_verdict_rests_on_the_interval(interval, expected):
    assert verdict(interval) == expected


def test_methods_are_known_by_what_they_store_not_by_their_name():
    def same(one, other):
        return identity(get_method(one)) == identity(get_method(other))

    assert same("kitty", "kitty-12.5-magnitude")
    assert same("kivi-k2v2-sink", "kitty-0-random")
    assert same("kivi-k4v2-sink", "kitty-100-variance")
    assert not same("kitty", "kitty-12.5-random")
    assert not same("kivi-k2v2", "kivi-k2v2-sink")
    assert not same("kitty-25-magnitude", "kitty-25-variance")


def test_orderings_are_found_under_sweep_names_too(tmp_path):
    kl = {"kitty-0-magnitude": 0.3, "kitty-12.5-magnitude": 0.2, "kitty-12.5-random": 0.25}
    fill(tmp_path, kl, analysis=False)
    found = [(o.worse, o.better) for o in expected_orderings(load_results(tmp_path))]
    assert found == [
        ("kitty-0-magnitude", "kitty-12.5-magnitude"),
        ("kitty-12.5-random", "kitty-12.5-magnitude"),
    ]


def test_a_boost_curve_holds_its_rule_and_the_ends_that_all_rules_share(results):
    (sweep,) = boost_sweeps(results)
    assert sweep["magnitude"] == [
        (0.0, "kivi-k2v2-sink"),
        (0.125, "kitty"),
        (0.25, "kitty-pro"),
        (1.0, "kivi-k4v2-sink"),
    ]
    assert [name for _, name in sweep["random"]][1:3] == ["kitty-12.5-random", "kitty-25-random"]
    assert len(sweep["variance"]) == 3


@pytest.fixture(scope="module")
def figures(folder):
    return write_figures(folder, folder.parent / "figures")


def test_tables_are_the_same_bytes_every_time_whatever_the_order_of_the_records(folder, tmp_path):
    first = write_tables(folder, tmp_path / "one")
    second = write_tables(list(reversed(list(find_records(folder)))), tmp_path / "two")
    assert [path.name for path in first] == table_files(True)
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


def test_figures_are_the_same_bytes_every_time(folder, figures, tmp_path):
    assert [path.name for path in figures] == figure_files(True)
    for one, two in zip(figures, write_figures(folder, tmp_path), strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


def test_tables_hold_no_times_dates_or_machine(folder, tmp_path):
    text = "".join(path.read_text() for path in write_tables(folder, tmp_path))
    for word in ("2025", "1.5", "1000", "Linux", "3.11.2"):
        assert not re.search(rf"(?<![\d.]){re.escape(word)}(?![\d.])", text), word


def test_every_png_is_wide_enough_to_print_and_not_blank(figures):
    for path in figures:
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF")
            assert b"CreationDate" not in path.read_bytes()
            continue
        image = np.asarray(Image.open(path).convert("L"))
        assert image.shape[1] == 1440  # 7.2 inches at 200 dpi
        assert image.std() > 10


def test_without_analysis_records_the_figures_of_the_analysis_are_left_out(tmp_path):
    fill(tmp_path / "records", {"fp16": 0.0, "kivi-k2v2": 0.5}, ("first",), analysis=False)
    figures = write_figures(tmp_path / "records", tmp_path)
    assert [path.name for path in figures] == figure_files(False)
    assert [path.name for path in write_tables(tmp_path / "records", tmp_path)] == table_files(
        False
    )
    assert "orderings.csv" in table_files(False)
    assert not any(name.startswith("channels") for name in table_files(False))


def test_every_named_file_has_its_maker():
    assert tuple(DRAWERS) == FIGURES
    assert tuple(BUILDERS) == TABLES


def test_several_models_have_rows_of_their_own(tmp_path):
    kl = {name: KL[name] for name in ("fp16", "kivi-k2v2-sink", "kitty", "kitty-12.5-random")}
    fill(tmp_path / "records", kl, ("first",), ("small", "large"))
    table = rows(to_csv(summary_table(load_results(tmp_path / "records"))))
    assert [row["model"] for row in table] == ["large"] * 4 + ["small"] * 4
    results = load_results(tmp_path / "records")
    heights = {}
    for name in FIGURES:
        image = Image.open(io.BytesIO(render(results, name, "png")))
        heights[name] = image.height
    assert heights["channels"] > 2000  # a block of 5.6 inches per model
    assert "| Model" in to_markdown(summary_table(load_results(tmp_path / "records")))


def test_markdown_and_latex_escape_what_they_must(results):
    markdown = to_markdown(summary_table(results))
    header, rule, *body = markdown.splitlines()
    assert header.count("|") == rule.count("|") == body[0].count("|")
    assert "KIVI-K2V2\\*" in markdown
    assert "0.1650 [0.1100, 0.2200]" in markdown
    latex = to_latex(summary_table(results))
    assert r"KIVI-K2V2$^{*}$ &" in latex
    assert r"12.5\% (random)" in latex
    assert latex.count(r"\\") == 1 + len(KL)


def test_a_small_negative_number_is_not_printed_as_minus_zero(tmp_path):
    fill(tmp_path, {"fp16": -1e-9}, ("first",), analysis=False)
    assert "-0.0" not in to_csv(quality_table(load_results(tmp_path)))


def test_the_report_is_one_file_with_every_table_figure_method_and_record(folder, tmp_path):
    path = write_html(folder, folder.parent / "report.html", title="Smoke <test>")
    text = path.read_text()
    assert "Smoke &lt;test&gt;" in text
    assert text.count("data:image/png;base64,") == len(FIGURES)
    assert not re.search(r'(src|href)="(?!data:|#)', text)  # nothing is fetched
    assert "records/quality/small/first/kitty/r0.json" in text
    assert "0123abc" in text
    for name in KL:
        assert f"<code>{name}</code>" in text
    assert text.count('class="holds"') >= 7
    assert "3.11.2" in text
    # claims: of these records, and of the committed measurements
    assert '<td class="reproduced">reproduced</td>' in text
    assert "claims that no record here tells of" in text
    assert "results/reference/h200/ops.json" in text


def test_a_missing_method_on_one_text_is_named(tmp_path):
    fill(tmp_path, {"fp16": 0.0, "kitty": 0.1})
    (tmp_path / "quality/small/second/kitty/r0.json").unlink()
    with pytest.raises(KittyError, match="missing for small/second/kitty"):
        write_tables(tmp_path, tmp_path / "tables")
    assert not (tmp_path / "tables").exists()


def test_an_empty_folder_and_a_damaged_record_are_told(tmp_path):
    with pytest.raises(KittyError, match="no quality record"):
        load_results(tmp_path)
    fill(tmp_path, {"kitty": 0.1}, ("first",), analysis=False)
    path = tmp_path / "quality/small/first/kitty/r0.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(KittyError, match=r"r0\.json is damaged"):
        write_figures(tmp_path, tmp_path / "figures")


def test_two_records_of_the_same_repeat_are_refused(tmp_path):
    for name in ("a", "b"):
        write_record(tmp_path / f"{name}.json", quality_record("kitty", [0.1, 0.2]))
    with pytest.raises(KittyError, match="claim the same repeat"):
        load_results(tmp_path)


def test_a_report_without_comparable_methods_has_no_section_of_orderings(tmp_path):
    for method, kl in (("fp16", 0.0), ("kivi-k4v4", 0.1)):
        write_record(tmp_path / "records" / f"{method}.json", quality_record(method, [kl, kl]))
    text = write_html(tmp_path / "records", tmp_path / "report.html").read_text()
    assert 'id="summary"' in text
    assert "orderings" not in text
