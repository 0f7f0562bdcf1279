"""Tables and figures of committed records, of whatever machines, without measuring anything.

`snakemake figures --config records=results/reference` draws by this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kitty import report
from kitty.record_sets import RecordSet, record_sets
from kitty.records import Record, write_atomically
from kitty.report.files import latency_figures, latency_tables

FOLDER = "redrawn"  # below the results folder
Records = list[tuple[Path, Record]]


@dataclass(frozen=True)
class Family:
    """Records that are drawn together.

    Attributes:
        kinds: of its records.
        names: of the files that :attr:`write` makes of the records, below the set's folder.
        write: makes them, given the records and the set's folder.
    """

    kinds: tuple[str, ...]
    names: Callable[[Records], list[str]]
    write: Callable[[Records, Path], object]


def _has_analysis(records: Records) -> bool:
    return any(record["kind"] == "analysis" for _, record in records)


def _figure_names(records: Records) -> list[str]:
    return [f"figures/{name}" for name in report.figure_files(_has_analysis(records))]


def _table_names(records: Records) -> list[str]:
    return [f"tables/{name}" for name in report.table_files(_has_analysis(records))]


def _draw_ops(records: Records, folder: Path) -> None:
    from kitty.benchmark.ops import plot

    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("pdf", "png"):
        plot(records[0][1]["metrics"]["rows"], folder / f"ops.{suffix}")


def _tabulate_ops(records: Records, folder: Path) -> None:
    from kitty.benchmark.ops import to_csv

    write_atomically(folder / "ops.csv", to_csv(records[0][1]["metrics"]["rows"]).encode())


def _task_table_names(records: Records) -> list[str]:
    names = [*report.task_table_files(), *report.paper_table_files()]
    return [f"tables/{name}" for name in names]


def _tabulate_tasks(records: Records, folder: Path) -> None:
    report.write_task_tables(records, folder / "tables")
    report.write_paper_tables(records, folder / "tables")


def _draw_latency(records: Records, folder: Path) -> None:
    report.write_latency(records, folder / "latency", latency_figures())


def _tabulate_latency(records: Records, folder: Path) -> None:
    report.write_latency(records, folder / "latency", latency_tables())


FIGURES = (
    Family(
        ("quality", "analysis"),
        _figure_names,
        lambda records, folder: report.write_figures(records, folder / "figures"),
    ),
    Family(
        ("task",),
        lambda _: [f"figures/{name}" for name in report.task_figure_files()],
        lambda records, folder: report.write_task_figures(records, folder / "figures"),
    ),
    Family(("ops",), lambda _: ["ops.pdf", "ops.png"], _draw_ops),
    Family(("latency",), lambda _: [f"latency/{x}" for x in latency_figures()], _draw_latency),
)
TABLES = (
    Family(
        ("quality", "analysis"),
        _table_names,
        lambda records, folder: report.write_tables(records, folder / "tables"),
    ),
    Family(("task",), _task_table_names, _tabulate_tasks),
    Family(("ops",), lambda _: ["ops.csv"], _tabulate_ops),
    Family(("latency",), lambda _: [f"latency/{x}" for x in latency_tables()], _tabulate_latency),
)


@dataclass(frozen=True)
class Redraw:
    """What is drawn of which records.

    Attributes:
        sets: the record sets.
        out: folder that gets a folder for each set.
    """

    sets: list[RecordSet]
    out: Path

    @classmethod
    def load(cls, records: str | Path, results: str | Path) -> Redraw:
        """The sets below ``records``, drawn below ``results/redrawn``.

        Raises:
            KittyError: there is no record, or one is damaged.
        """
        return cls(record_sets(records), Path(results) / FOLDER)

    def inputs(self) -> list[str]:
        """Paths of all records."""
        return [str(path) for found in self.sets for path, _ in found.records.values()]

    def figures(self) -> list[str]:
        """Paths of all figures."""
        return self._names(FIGURES)

    def tables(self) -> list[str]:
        """Paths of all tables."""
        return self._names(TABLES)

    def write_figures(self) -> None:
        """Draw all figures."""
        self._write(FIGURES)

    def write_tables(self) -> None:
        """Write all tables."""
        self._write(TABLES)

    def _names(self, families: tuple[Family, ...]) -> list[str]:
        return [
            str(self.out / found.name / name)
            for found in self.sets
            for family in families
            if (records := found.of_kinds(*family.kinds))
            for name in family.names(records)
        ]

    def _write(self, families: tuple[Family, ...]) -> None:
        for found in self.sets:
            for family in families:
                if records := found.of_kinds(*family.kinds):
                    family.write(records, self.out / found.name)
