"""Tables, figures and the HTML report of an experiment, made of its records alone."""

from kitty.report.data import Results, load_results
from kitty.report.figures import figure_files, write_figures
from kitty.report.html import write_html
from kitty.report.tables import table_files, write_tables

__all__ = [
    "Results",
    "figure_files",
    "load_results",
    "table_files",
    "write_figures",
    "write_html",
    "write_tables",
]
