# Tables and figures of committed records: nothing is measured, no experiment file is needed.

from kitty.redraw import Redraw

try:
    REDRAW = Redraw.load(config["records"], config.get("results", "results"))
except KittyError as error:
    raise WorkflowError(str(error)) from None

QUALITY, ANALYSES, TASKS, REPORT, CLAIMS = [], [], [], [], []
LATENCIES, LATENCY_FILES = [], []
TABLES, FIGURES = REDRAW.tables(), REDRAW.figures()


rule redraw_figures:
    input:
        REDRAW.inputs(),
    output:
        report(FIGURES, caption="captions/figures.rst", category="Figures"),
    log:
        f"{REDRAW.out}/logs/figures.log",
    threads: 1
    params:
        records=config["records"],
        results=config.get("results", "results"),
    shell:
        "python3 -m kitty job redraw figures --records {params.records:q}"
        " --results {params.results:q} > {log:q} 2>&1"


rule redraw_tables:
    input:
        REDRAW.inputs(),
    output:
        report(TABLES, caption="captions/tables.rst", category="Tables"),
    log:
        f"{REDRAW.out}/logs/tables.log",
    threads: 1
    params:
        records=config["records"],
        results=config.get("results", "results"),
    shell:
        "python3 -m kitty job redraw tables --records {params.records:q}"
        " --results {params.results:q} > {log:q} 2>&1"
