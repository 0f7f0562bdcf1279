# Downstream tasks: one record and one file of predictions per model, task, method and repeat.


rule task:
    input:
        f"{ROOT}/models/{{model}}.json",
    output:
        record=f"{ROOT}/records/tasks/{{model}}/{{task}}/{{method}}/r{{repeat}}.json",
        samples=f"{ROOT}/records/tasks/{{model}}/{{task}}/{{method}}/r{{repeat}}.samples.jsonl",
    log:
        f"{ROOT}/logs/tasks/{{model}}/{{task}}/{{method}}/r{{repeat}}.log",
    threads: EXPERIMENT.threads
    resources:
        mem_mb=lambda wildcards, attempt: PLAN.task_run(**wildcards).memory_mb * attempt,
        gpu=lambda wildcards: PLAN.task_run(**wildcards).gpus,
        runtime=lambda wildcards, attempt: (
            PLAN.task_run(**wildcards).runtime or EXPERIMENT.minutes
        )
        * attempt,
    params:
        experiment=SOURCE,
        setting=lambda wildcards: PLAN.task_setting(**wildcards),
        run_code=RUN_CODE,
    shell:
        "python3 -m kitty job task --experiment {params.experiment:q} --model {wildcards.model:q}"
        " --task {wildcards.task:q} --method {wildcards.method:q} --repeat {wildcards.repeat}"
        " {params.run_code} --out {output.record:q} > {log:q} 2>&1"
