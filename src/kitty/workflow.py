"""What the Snakemake rules need to know about an experiment: places of files, settings of jobs.

The rules stay free of logic; a change of a setting here is what makes Snakemake measure again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitty import report
from kitty.errors import KittyError
from kitty.experiments import Experiment, load_experiment
from kitty.jobs import source_of, task_job
from kitty.models import ModelSpec
from kitty.paths import configs_dir
from kitty.records import Record, read_record
from kitty.task_runs import TaskRun
from kitty.texts import load_passage


@dataclass(frozen=True)
class Work:
    """A record that an experiment asks for.

    Attributes:
        record: its path below the experiment's folder.
        needs: files that other jobs make for it, in the order in which they are made.
    """

    record: str
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """An experiment and the folder of its results."""

    experiment: Experiment
    root: Path

    @classmethod
    def load(cls, experiment: str, results: str | Path) -> Plan:
        """The plan of an experiment by name or file, with results below ``results``.

        Raises:
            KittyError: the experiment is unknown or wrong.
        """
        loaded = load_experiment(experiment)
        return cls(loaded, Path(results) / loaded.name)

    def experiment_argument(self) -> str:
        """How a job names the experiment: a shipped one by name, so the package may be moved."""
        shipped = self.experiment.source.parent == configs_dir() / "experiments"
        return self.experiment.name if shipped else str(self.experiment.source)

    def model_argument(self, model: str) -> str:
        """How the job that obtains a model names it."""
        return source_of(self.experiment.models[model])

    def quality_records(self) -> list[str]:
        """Paths of all quality records."""
        return [str(self.root / job.record) for job in self.experiment.jobs()]

    def analysis_record(self, model: str, passage: str) -> Path:
        """Path of one analysis record."""
        return self.root / "records" / "analysis" / model / f"{passage}.json"

    def analysis_records(self) -> list[str]:
        """Paths of all analysis records."""
        return [str(self.analysis_record(*pair)) for pair in self.experiment.analyses()]

    def latency_records(self) -> list[str]:
        """Paths of all records of end-to-end measurements."""
        return [str(job.path(self.root)) for job in self.experiment.latency]

    def latency_needs(self, model: str) -> list[str]:
        """What an end-to-end measurement needs: its model, unless the weights are random."""
        dummy = any(job.dummy_weights for job in self.experiment.latency)
        return [] if dummy else [str(self.root / _model_file(model))]

    def work(self) -> list[Work]:
        """Every record with what it needs; paths are relative to the experiment's folder.

        Without those of time and memory: they are not made beside anything else, but by the run
        that joins the others' records.
        """
        found = [
            Work(job.record, (_model_file(job.model), _reference_file(job.model, job.passage)))
            for job in self.experiment.jobs()
        ]
        for model, passage in self.experiment.analyses():
            record = self.analysis_record(model, passage).relative_to(self.root)
            found.append(Work(str(record), (_model_file(model),)))
        found += [Work(run.record, (_model_file(run.model),)) for run in self.experiment.task_runs]
        return found

    def task_records(self) -> list[str]:
        """Paths of all records of downstream tasks."""
        return [str(self.root / run.record) for run in self.experiment.task_runs]

    def task_run(self, model: str, task: str, method: str, repeat: str) -> TaskRun:
        """One task run by the names in its path."""
        return self.experiment.task_run(model, task, method, int(repeat))

    def wants_gpu(self) -> bool:
        """Whether the jobs ask for a GPU."""
        devices = [self.experiment.device, *(job.device for job in self.experiment.latency)]
        return any(device.startswith("cuda") for device in devices)

    def runs_code(self) -> list[str]:
        """Names of the tasks that run code which the model writes."""
        return sorted({run.task.name for run in self.experiment.task_runs if run.task.runs_code})

    # Settings: plain data that decides a job's result.

    def reference_setting(self, model: str, passage: str) -> dict[str, Any]:
        """What a reference pass depends on."""
        experiment = self.experiment
        spec: ModelSpec = experiment.models[model]
        return {
            "model": spec.source,
            "dtype": experiment.dtype or spec.dtype,
            "passage": load_passage(experiment.passages[passage]).sha256,
            "tokens": experiment.tokens,
        }

    def quality_setting(self, model: str, passage: str, method: str, repeat: str) -> dict[str, Any]:
        """What a quality record depends on."""
        job = self.experiment.job(model, passage, method, int(repeat))
        return {"method": job.method.to_dict(), **self.reference_setting(model, passage)}

    def analysis_setting(self, model: str, passage: str) -> dict[str, Any]:
        """What an analysis record depends on."""
        method = self.experiment.analysis_method
        assert method is not None
        return {
            "method": method.to_dict(),
            "layer": self.experiment.analysis_layer,
            **self.reference_setting(model, passage),
        }

    def task_setting(self, model: str, task: str, method: str, repeat: str) -> dict[str, Any]:
        """What a task record depends on."""
        run = self.task_run(model, task, method, repeat)
        job = task_job(self.experiment, run, run_code=True)
        dtype = job.dtype or job.spec.dtype
        weights = {"model": job.spec.source, "dtype": dtype}
        return {**weights, **job.setting(), "limit": run.task.limit}

    def latency_setting(self, model: str, implementation: str, workload: str) -> dict[str, Any]:
        """What the record of an end-to-end measurement depends on."""
        job = self.experiment.latency_job(model, implementation, workload)
        return {
            "model": job.model,
            "mode": job.mode,
            "memory_budget": job.memory_budget_bytes,
            "method": job.method(),
            **job.settings(),
        }

    def records(self) -> list[tuple[Path, Record]]:
        """All records of the experiment, and no others that may lie in the folder.

        Raises:
            KittyError: one is missing, damaged, or was measured with another setting.
        """
        return [*self.accuracy_records(), *self.checked_latency_records()]

    def accuracy_records(self) -> list[tuple[Path, Record]]:
        """The records of quality, channels and tasks; raises as :meth:`records` does."""
        found = []
        for job in self.experiment.jobs():
            path = self.root / job.record
            found.append((path, self._checked(path, job.passage, job.method.to_dict())))
        method = self.experiment.analysis_method
        for model, passage in self.experiment.analyses():
            assert method is not None
            path = self.analysis_record(model, passage)
            found.append((path, self._checked(path, passage, method.to_dict())))
        return found + [self._checked_task(run) for run in self.experiment.task_runs]

    def _checked_task(self, run: TaskRun) -> tuple[Path, Record]:
        path = self.root / run.record
        record = read_record(path)
        job = task_job(self.experiment, run, run_code=True)
        expected = {
            "method": (record["method"], job.method.to_dict()),
            "cache": (record["cache"], run.cache),
            "number of problems": (record["task"]["limit"], run.task.limit),
            "data set": (record["task"]["data_sha256"], job.task.to_dict()["data_sha256"]),
        }
        self._check_settings(path, expected)
        return path, record

    def checked_latency_records(self) -> list[tuple[Path, Record]]:
        """The records of time and memory; raises as :meth:`records` does."""
        found = []
        for job in self.experiment.latency:
            path = job.path(self.root)
            record = read_record(path)
            if (other := job.difference(record)) is not None:
                raise _other_setting(path, other, self.experiment)
            found.append((path, record))
        return found

    def _checked(self, path: Path, passage: str, method: dict[str, Any]) -> Record:
        record = read_record(path)
        expected = {
            "method": (record["method"], method),
            "number of tokens": (record["passage"]["num_tokens"], self.experiment.tokens),
            "text": (
                record["passage"]["sha256"],
                load_passage(self.experiment.passages[passage]).sha256,
            ),
        }
        self._check_settings(path, expected)
        return record

    def _check_settings(self, path: Path, expected: dict[str, tuple[Any, Any]]) -> None:
        for what, (measured, wanted) in expected.items():
            if measured != wanted:
                raise _other_setting(path, what, self.experiment)

    # Tables, figures, report.

    def tables(self) -> list[str]:
        """Paths of all tables."""
        names = list(report.CLAIMS)
        if self.experiment.methods:
            names += report.table_files(analysis=bool(self.experiment.analyses()))
        if self.experiment.task_runs:
            names += [*report.task_table_files(), *report.paper_table_files()]
        return [str(self.root / "tables" / name) for name in names]

    def claims(self) -> list[str]:
        """Paths of the judged claims."""
        return [str(self.root / "tables" / name) for name in report.CLAIMS]

    def reference_records(self) -> list[str]:
        """Committed measurements, which the claims are held against too."""
        from kitty.report.claims import collect, reference_places

        return [str(path) for path, _ in collect(reference_places())]

    def figures(self) -> list[str]:
        """Paths of all figures."""
        names: list[str] = []
        if self.experiment.methods:
            names += report.figure_files(analysis=bool(self.experiment.analyses()))
        if self.experiment.task_runs:
            names += report.task_figure_files()
        return [str(self.root / "figures" / name) for name in names]

    def latency_files(self) -> list[str]:
        """Paths of all tables and figures that hold times."""
        names = report.latency_files() if self.experiment.latency else []
        return [str(self.root / "latency" / name) for name in names]

    def report(self) -> str:
        """Path of the HTML report."""
        return str(self.root / "report.html")

    def write_tables(self) -> list[Path]:
        """Write all tables, from the experiment's records alone."""
        records, folder = self.records(), self.root / "tables"
        paths = report.write_claims(records, folder, root=self.root)
        if self.experiment.methods:
            paths = [*report.write_tables(records, folder), *paths]
        if self.experiment.task_runs:
            paths += report.write_task_tables(records, folder)
            paths += report.write_paper_tables(records, folder)
        return paths

    def write_figures(self) -> list[Path]:
        """Write all figures, from the experiment's records alone."""
        records, folder = self.accuracy_records(), self.root / "figures"
        paths: list[Path] = []
        if self.experiment.methods:
            paths += report.write_figures(records, folder)
        if self.experiment.task_runs:
            paths += report.write_task_figures(records, folder)
        return paths

    def write_latency(self) -> list[Path]:
        """Write the tables and figures of time and memory, from the experiment's records alone."""
        if not self.experiment.latency:
            return []
        return report.write_latency(self.checked_latency_records(), self.root / "latency")

    def write_report(self) -> Path:
        """Write the HTML report, from the experiment's records alone."""
        return report.write_html(
            self.records(),
            self.root / "report.html",
            title=self.experiment.title,
            description=self.experiment.description,
        )


def _other_setting(path: Path, what: str, experiment: Experiment) -> KittyError:
    return KittyError(
        f"The record {path} was measured with another {what} than experiment "
        f"{experiment.name!r} now asks for: delete the file and run the same command again."
    )


def _model_file(model: str) -> str:
    return f"models/{model}.json"


def _reference_file(model: str, passage: str) -> str:
    return f"references/{model}/{passage}.safetensors"
