# Quality of every method: obtain the model, one 16-bit pass per text, one record per job.


rule obtain_model:
    output:
        f"{ROOT}/models/{{model}}.json",
    log:
        f"{ROOT}/logs/models/{{model}}.log",
    threads: 1
    resources:
        mem_mb=memory_mb,
        runtime=minutes,
    params:
        model=lambda wildcards: PLAN.model_argument(wildcards.model),
    shell:
        "python3 -m kitty job model --model {params.model:q}"
        " --out {output:q} > {log:q} 2>&1"


rule reference:
    input:
        f"{ROOT}/models/{{model}}.json",
    output:
        f"{ROOT}/references/{{model}}/{{passage}}.safetensors",
    log:
        f"{ROOT}/logs/references/{{model}}/{{passage}}.log",
    threads: EXPERIMENT.threads
    resources:
        mem_mb=memory_mb,
        runtime=minutes,
        gpu=GPU,
    params:
        experiment=SOURCE,
        setting=lambda wildcards: PLAN.reference_setting(
            wildcards.model, wildcards.passage
        ),
    shell:
        "python3 -m kitty job reference --experiment {params.experiment:q} --model {wildcards.model:q}"
        " --passage {wildcards.passage:q} --out {output:q} > {log:q} 2>&1"


rule quality:
    input:
        reference=f"{ROOT}/references/{{model}}/{{passage}}.safetensors",
    output:
        f"{ROOT}/records/quality/{{model}}/{{passage}}/{{method}}/r{{repeat}}.json",
    log:
        f"{ROOT}/logs/quality/{{model}}/{{passage}}/{{method}}/r{{repeat}}.log",
    threads: EXPERIMENT.threads
    resources:
        mem_mb=memory_mb,
        runtime=minutes,
        gpu=GPU,
    params:
        experiment=SOURCE,
        setting=lambda wildcards: PLAN.quality_setting(**wildcards),
    shell:
        "python3 -m kitty job quality --experiment {params.experiment:q} --model {wildcards.model:q}"
        " --passage {wildcards.passage:q} --method {wildcards.method:q} --repeat {wildcards.repeat}"
        " --reference {input.reference:q} --out {output:q} > {log:q} 2>&1"
