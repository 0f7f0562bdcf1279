# Time and memory of generation with several caches (the paper's Figure 5): one record per model,
# implementation and workload, each measured in a process of its own.


rule generation:
    input:
        lambda wildcards: PLAN.latency_needs(wildcards.model),
    output:
        f"{ROOT}/records/latency/{{model}}/{{implementation}}/{{workload}}.json",
    log:
        f"{ROOT}/logs/latency/{{model}}/{{implementation}}/{{workload}}.log",
    # nothing else runs beside it, or the times would be those of a busy machine
    threads: ALL_CORES
    resources:
        mem_mb=memory_mb,
        runtime=minutes,
        gpu=GPU,
    params:
        experiment=SOURCE,
        setting=lambda wildcards: PLAN.latency_setting(**wildcards),
        results=lambda wildcards, output: Path(output[0]).parents[4],
    shell:
        "python3 -m kitty job latency --experiment {params.experiment:q} --model {wildcards.model:q}"
        " --implementation {wildcards.implementation:q} --workload {wildcards.workload:q}"
        " --results {params.results:q} > {log:q} 2>&1"


if LATENCY_FILES:

    rule make_latency:
        input:
            LATENCIES,
        output:
            report(
                LATENCY_FILES,
                caption="captions/latency.rst",
                category="Time and memory",
            ),
        log:
            f"{ROOT}/logs/latency.log",
        threads: 1
        params:
            experiment=SOURCE,
            results=lambda wildcards, output: Path(output[0]).parents[2],
        shell:
            "python3 -m kitty job report latency --experiment {params.experiment:q}"
            " --results {params.results:q} > {log:q} 2>&1"
