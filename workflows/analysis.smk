# Why a few key channels deserve more bits: one record per model and text (the paper's Figure 2).


rule channels:
    input:
        f"{ROOT}/models/{{model}}.json",
    output:
        f"{ROOT}/records/analysis/{{model}}/{{passage}}.json",
    log:
        f"{ROOT}/logs/analysis/{{model}}/{{passage}}.log",
    threads: EXPERIMENT.threads
    resources:
        mem_mb=memory_mb,
        runtime=minutes,
        gpu=GPU,
    params:
        experiment=SOURCE,
        setting=lambda wildcards: PLAN.analysis_setting(
            wildcards.model, wildcards.passage
        ),
    shell:
        "python3 -m kitty job analysis --experiment {params.experiment:q} --model {wildcards.model:q}"
        " --passage {wildcards.passage:q} --out {output:q} > {log:q} 2>&1"
