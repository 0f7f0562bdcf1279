"""Task settings and the experiments made of them: what is run is what was asked for."""

from collections import Counter

import pytest

from kitty.errors import KittyError
from kitty.evaluation import standins
from kitty.experiments import load_experiment
from kitty.paths import configs_dir
from kitty.tasks import known_tasks, load_task, seeds

PAPER_TASKS = {  # shots, chat template, new tokens: sections 5.1 and 5.3, and the authors' runner
    "gsm8k_cot_llama": (8, False, 4096),
    "minerva_math_algebra": (4, False, 4096),
    "humaneval_instruct": (0, False, 4096),
    "gpqa_diamond_cot_n_shot": (5, False, 4096),
    "aime24": (0, True, 32768),
    "aime25": (0, True, 32768),
    "mmlu_flan_cot_fewshot": (4, False, 4096),
}


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_a_task_of_the_paper_has_the_papers_setting(name):
    task = load_task(name)
    generation = dict(task.generation)
    assert generation.pop("until")
    shots, template, tokens = PAPER_TASKS[name]
    assert (task.num_fewshot, task.chat_template, task.limit) == (shots, template, None)
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert generation == {"max_gen_toks": tokens, **sampling}
    assert task.provider == "hub"
    assert task.runs_code == (name == "humaneval_instruct")


def test_a_change_replaces_one_argument_and_is_told():
    task = load_task("aime24", {"generation": {"do_sample": False}, "limit": 3})
    assert task.to_dict()["generation"]["do_sample"] is False
    assert task.to_dict()["generation"]["max_gen_toks"] == 32768
    assert task.to_dict()["limit"] == 3


def test_repeats_have_the_seeds_of_the_authors_runner():
    assert seeds(0) == {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
    assert seeds(7) == {"random": 7, "numpy": 1241, "torch": 1241, "fewshot": 1241}


@pytest.mark.parametrize(
    "name, changes, sentence",
    [
        ("aime24", {"limit": 0}, "limit of task 'aime24' is 0"),
        ("aime24", {"provider": "disk"}, "Provider 'disk' is not known"),
        ("arc_easy", {"provider": "standin"}, "'arc_easy' has no stand-in"),
        ("aime24", {"data": "/nowhere.jsonl"}, "/nowhere.jsonl of task 'aime24' does not exist"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_sentence(name, changes, sentence):
    with pytest.raises(KittyError, match=sentence):
        load_task(name, changes)


@pytest.mark.parametrize("name", standins.SETS)
def test_the_shipped_stand_ins_are_what_the_generator_makes(name):
    assert (configs_dir() / "standins" / f"{name}.jsonl").read_text() == standins.text(name)


def test_every_task_of_lm_eval_has_a_stand_in():
    shipped = {path.name for path in (configs_dir() / "standins").glob("*.jsonl")}
    tasks = [load_task(name) for name in known_tasks()]
    assert {t.standin["file"] for t in tasks if t.recall is None} <= shipped
    assert set(PAPER_TASKS) <= set(known_tasks())


# Rows × tasks × repeats of the paper's tables; repeats as their files say.
JOBS = {
    "paper-table1": 2 * 3 * 2 * 3 + 2 * 3 * 2 * 10 + 3 * 2 * 10,
    "paper-table2": 2 * 5 * 2 * 3 + 2 * 5 * 2 * 10 + 5 * 2 * 10,
    "paper-table3": 2 * 5 * 2 * 3 + 2 * 5 * 2 * 10 + 2 * 4 * 4 * 3 + 5 * 4 * 3,
    "paper-table4": 3 * 4 * 2 * 10,
    "paper-figure4": 2 * (1 + 9 + 7) * 3,
}


@pytest.mark.parametrize("name", JOBS)
def test_an_experiment_of_the_paper_has_a_job_for_every_cell_and_repeat(name):
    assert len(load_experiment(name).task_runs) == JOBS[name]


def test_the_whole_paper_measures_what_its_tables_share_once():
    def jobs(name):
        runs = load_experiment(name).task_runs
        return {
            (run.model, run.task.name, run.method.bits_per_element(128), run.method.sink,
             run.method.selection if 0 < run.method.boost_ratio < 1 else "", run.repeat)
            for run in runs
        }  # fmt: skip

    whole = load_experiment("paper").task_runs
    assert len(whole) == len(jobs("paper"))
    assert jobs("paper") == set().union(*(jobs(name) for name in JOBS))
    assert len(whole) < sum(JOBS.values())


def test_larger_models_get_more_gpus_and_are_spread_over_them():
    runs = load_experiment("paper-table3").task_runs
    gpus = {run.model: run.gpus for run in runs}
    assert gpus["qwen3-8b"] == 1 < gpus["qwen3-32b"] < gpus["llama-3.3-70b-instruct"]
    assert {run.device("cuda") for run in runs if run.gpus == 1} == {"cuda"}
    assert {run.device("cuda") for run in runs if run.gpus > 1} == {"auto"}


def test_a_long_experiment_has_one_task_at_several_lengths():
    runs = load_experiment("long").task_runs
    lengths = Counter((run.task.name, run.task.recall["tokens"]) for run in runs)
    assert {("key_retrieval-2048", 2048), ("key_retrieval-8192", 8192)} <= set(lengths)


@pytest.mark.parametrize(
    "tasks, sentence",
    [
        ("{grids: [{tasks: [aime24], methods: [nothing]}]}", "Method 'nothing' is not known"),
        ("{grids: [{tasks: [aime24], methods: [kitty], models: [qwen3-4b]}]}", "not among its mod"),
        ("{grids: [{tasks: [a], methods: [kitty]}], settings: {a: {like: b}}}", "is like 'b'"),
        ("{grids: [{tasks: [aime24]}]}", "wrong at tasks/grids/0"),
    ],
)
def test_a_wrong_grid_is_refused_in_one_sentence(tmp_path, tasks, sentence):
    path = tmp_path / "mine.yaml"
    path.write_text(f"title: Mine\nmodels: [qwen3-8b]\ntasks: {tasks}\n")
    with pytest.raises(KittyError, match=sentence):
        load_experiment(path)
