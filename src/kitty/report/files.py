"""Names of the files that tables and figures go to, known before anything is measured."""

from __future__ import annotations

TABLES = ("quality", "summary", "differences", "orderings", "channels")
TABLE_FORMATS = ("csv", "md", "tex")
FIGURES = ("quality", "boost", "attention_error", "channels", "selection")
FIGURE_FORMATS = ("pdf", "png")
CLAIMS = ("claims.csv", "claims.md")
OF_ANALYSIS = ("channels", "selection")  # made only where there are analysis records
# What holds times lies apart: no two runs of it agree, while tables and figures do byte for byte.
LATENCY_TABLES = ("latency", "latency_best")
LATENCY_FIGURES = ("figure5", "break_even")


def latency_tables() -> list[str]:
    """Names of the tables of end-to-end measurements."""
    return [f"{name}.{suffix}" for name in LATENCY_TABLES for suffix in TABLE_FORMATS]


def latency_figures() -> list[str]:
    """Names of the figures of end-to-end measurements."""
    return [f"{name}.{suffix}" for name in LATENCY_FIGURES for suffix in FIGURE_FORMATS]


def latency_files() -> list[str]:
    """Names of both."""
    return latency_tables() + latency_figures()


def table_files(analysis: bool) -> list[str]:
    """Names of the files of all tables; ``analysis``: with those of the channel analysis."""
    return _files(TABLES, TABLE_FORMATS, analysis)


def figure_files(analysis: bool) -> list[str]:
    """Names of the files of all figures; ``analysis``: with those of the channel analysis."""
    return _files(FIGURES, FIGURE_FORMATS, analysis)


def _files(names: tuple[str, ...], formats: tuple[str, ...], analysis: bool) -> list[str]:
    kept = [name for name in names if analysis or name not in OF_ANALYSIS]
    return [f"{name}.{suffix}" for name in kept for suffix in formats]
