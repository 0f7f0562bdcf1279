# Tables, figures and the report, made of the records alone.


rule make_tables:
    input:
        QUALITY,
        ANALYSES,
        TASKS,
        LATENCIES,
        REFERENCE,
    output:
        report(
            TABLES,
            caption="captions/tables.rst",
            category="Tables",
            labels=lambda wildcards: {"experiment": EXPERIMENT.name},
        ),
    log:
        f"{ROOT}/logs/tables.log",
    threads: 1
    params:
        experiment=SOURCE,
        results=lambda wildcards, output: Path(output[0]).parents[2],
    shell:
        "python3 -m kitty job report tables --experiment {params.experiment:q}"
        " --results {params.results:q} > {log:q} 2>&1"


if FIGURES:

    rule make_figures:
        input:
            QUALITY,
            ANALYSES,
            TASKS,
        output:
            report(FIGURES, caption="captions/figures.rst", category="Figures"),
        log:
            f"{ROOT}/logs/figures.log",
        threads: 1
        params:
            experiment=SOURCE,
            results=lambda wildcards, output: Path(output[0]).parents[2],
        shell:
            "python3 -m kitty job report figures --experiment {params.experiment:q}"
            " --results {params.results:q} > {log:q} 2>&1"


rule make_report:
    input:
        QUALITY,
        ANALYSES,
        TASKS,
        REFERENCE,
        LATENCIES,
    output:
        report(REPORT, caption="captions/report.rst", category="Report"),
    log:
        f"{ROOT}/logs/report.log",
    threads: 1
    params:
        experiment=SOURCE,
        results=lambda wildcards, output: Path(output[0]).parents[1],
    shell:
        "python3 -m kitty job report report --experiment {params.experiment:q}"
        " --results {params.results:q} > {log:q} 2>&1"


# A document of the user's own is no output: Snakemake would delete it before the job.
if config.get("document"):
    CLAIMS = [f"{ROOT}/logs/claims-document.done"]


rule write_claims:
    input:
        PLAN.claims(),
    output:
        touch(f"{ROOT}/logs/claims-document.done"),
    log:
        f"{ROOT}/logs/claims-document.log",
    threads: 1
    params:
        records=f"{ROOT}/records",
        reference=REFERENCE,
        document=config.get("document", ""),
    shell:
        "python3 -m kitty claims {params.records:q} {params.reference:q}"
        " --write {params.document:q} > {log:q} 2>&1"
