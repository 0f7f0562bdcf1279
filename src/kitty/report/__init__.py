"""Tables, figures and the HTML report of an experiment, made of its records alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitty.report.files import CLAIMS, figure_files, latency_files, table_files

if TYPE_CHECKING:
    from kitty.report.claims_text import write_claims
    from kitty.report.data import Results, load_results
    from kitty.report.figures import write_figures
    from kitty.report.html import write_html
    from kitty.report.latency import write_latency
    from kitty.report.paper_tables import paper_table_files, write_paper_tables
    from kitty.report.tables import write_tables
    from kitty.report.task_figures import task_figure_files, write_task_figures
    from kitty.report.task_tables import task_table_files, write_task_tables

_HOMES = {
    "Results": "data",
    "load_results": "data",
    "paper_table_files": "paper_tables",
    "write_claims": "claims_text",
    "write_paper_tables": "paper_tables",
    "write_figures": "figures",
    "write_html": "html",
    "write_latency": "latency",
    "write_tables": "tables",
    "task_figure_files": "task_figures",
    "write_task_figures": "task_figures",
    "task_table_files": "task_tables",
    "write_task_tables": "task_tables",
}

__all__ = [
    "CLAIMS",
    "Results",
    "figure_files",
    "latency_files",
    "load_results",
    "paper_table_files",
    "table_files",
    "task_figure_files",
    "write_claims",
    "write_figures",
    "write_html",
    "write_latency",
    "write_paper_tables",
    "write_tables",
    "write_task_figures",
    "task_table_files",
    "write_task_tables",
]


def __getattr__(name: str) -> Any:
    # whoever only asks for file names must not wait for pandas and seaborn
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"kitty.report.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kitty.report' has no attribute {name!r}")
