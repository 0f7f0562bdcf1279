# Kitty's pipeline: one experiment file in, records, tables, figures and an HTML report out.
#
#   snakemake all --cores 2 --config experiment=smoke results=results
#
# experiment   a name of configs/experiments, or the path of an experiment file (default smoke)
# run_code     true: tasks such as HumanEval may run what the model writes (default: they refuse)
# results      folder that gets a folder of the experiment's name (default results)
# records      a folder of records, such as results/reference: nothing is measured, `tables` and `figures` are made
#              of them, in results/redrawn
# document     a document with claims markers, such as ARTIFACT.md, that the target `claims` brings up to date
#
# `kitty run` starts the same with the profile in configs/profiles/default and clears stale locks.


include: "workflows/common.smk"


if "records" in config:

    include: "workflows/redraw.smk"

else:

    include: "workflows/accuracy.smk"
    include: "workflows/analysis.smk"
    include: "workflows/tasks.smk"
    include: "workflows/latency.smk"
    include: "workflows/report.smk"


localrules:
    all,
    accuracy,
    analysis,
    tasks,
    latency,
    tables,
    figures,
    report,
    claims,


rule all:
    default_target: True
    input:
        QUALITY,
        ANALYSES,
        TASKS,
        LATENCIES,
        TABLES,
        FIGURES,
        LATENCY_FILES,
        REPORT,


rule accuracy:
    input:
        QUALITY,


rule analysis:
    input:
        ANALYSES,


rule tasks:
    input:
        TASKS,


rule latency:
    input:
        LATENCIES,
        LATENCY_FILES,


rule tables:
    input:
        TABLES,


rule figures:
    input:
        FIGURES,
        [file for file in LATENCY_FILES if file.endswith(FIGURE_SUFFIXES)],


rule report:
    input:
        REPORT,


rule claims:
    input:
        CLAIMS,
