"""Experiment files: every shipped one is sound, and becomes the jobs that it should."""

from itertools import pairwise

import pytest
import yaml

from kitty.errors import KittyError
from kitty.experiments import known_experiments, load_experiment, same_storage
from kitty.methods import get_method
from kitty.models import obtain_embedded

BASE = {
    "title": "Test",
    "models": ["smollm2-135m-instruct"],
    "passages": ["python-data-model"],
    "tokens": 576,
    "methods": ["fp16", "kitty"],
}


def experiment(tmp_path, **changes):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes}))
    return load_experiment(path)


@pytest.mark.parametrize("name", known_experiments())
def test_a_shipped_experiment_is_sound(name):
    loaded = load_experiment(name)
    assert loaded.name == name
    records = [job.record for job in (*loaded.jobs(), *loaded.task_runs, *loaded.latency)]
    assert len(records) == len(set(records)) > 0


def test_the_smoke_experiment_measures_what_its_claims_need():
    smoke = load_experiment("smoke")
    assert smoke.tokens >= 2048
    assert len(smoke.passages) >= 2
    named = {method.name for method in smoke.methods}
    assert {"fp16", "kivi-k4v4", "kivi-k2v2", "kivi-k2v2-sink", "kivi-k2v4-sink"} <= named
    assert {"kivi-k4v2-sink", "kitty", "kitty-pro", "kitty-12.5-random"} <= named
    assert min(method.key_pages(smoke.tokens) for method in smoke.methods if method.quantized) >= 14


def test_the_ablation_has_every_step_of_the_boost_sweep_and_the_frontier_below_two_bits():
    ablation = load_experiment("ablation")
    for selection in ("magnitude", "random", "variance", "rotary"):
        steps = {
            method.boost_ratio
            for method in ablation.methods
            if method.key_bits == method.value_bits == 2
            and (method.selection == selection or method.boost_ratio in (0, 1))
        }
        assert sorted(steps) == [i / 8 for i in range(9)]
        assert all(b - a == 0.125 for a, b in pairwise(sorted(steps)))
    assert any(method.key_bits == 1 and method.boost_bits == 2 for method in ablation.methods)
    assert any(method.value_bits == 1 for method in ablation.methods)


def test_points_of_a_sweep_that_equal_another_method_are_measured_once(tmp_path):
    sweep = {"prefix": "kitty", "percent": [0, 12.5, 100], "selection": ["magnitude", "random"]}
    methods = experiment(tmp_path, methods=["kivi-k2v2-sink", "kitty"], sweeps=[sweep]).methods
    assert [m.name for m in methods] == [
        "kivi-k2v2-sink",  # also 0% of either selection
        "kitty",  # also 12.5% by magnitude
        "kitty-100-magnitude",  # also 100% at random
        "kitty-12.5-random",
    ]


def test_same_storage_ignores_what_makes_no_difference_and_nothing_else():
    kitty = get_method("kitty")
    assert same_storage(kitty) == same_storage(kitty.replace(seed=5, name="x", title="x"))
    random = get_method("kitty-12.5-random")
    assert same_storage(random) != same_storage(random.replace(seed=5))
    for change in ({"sink": 0}, {"boost_bits": 3}, {"page_size": 64}, {"selection": "variance"}):
        assert same_storage(kitty) != same_storage(kitty.replace(**change))


def test_only_random_selections_are_repeated_each_with_its_seed(tmp_path):
    loaded = experiment(tmp_path, methods=["kitty", "kitty-25-random"], repeats=3, seed=10)
    jobs = [(job.method.name, job.repeat, job.method.seed) for job in loaded.jobs()]
    assert jobs == [
        ("kitty", 0, 10),
        ("kitty-25-random", 0, 10),
        ("kitty-25-random", 1, 11),
        ("kitty-25-random", 2, 12),
    ]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"methods": ["kitty", "nope"]}, "'nope' is not known"),
        ({"models": ["nope"]}, "'nope' is not known"),
        ({"passages": ["nope"]}, "'nope'"),
        ({"tokens": 400}, "needs 416"),
        ({"tokens": "many"}, "wrong at tokens"),
        ({"token": 1}, "'token' was unexpected"),
        ({"methods": []}, "wrong at methods"),
        ({"sweeps": [{"prefix": "kitty", "percent": [13], "selection": ["random"]}]}, "not known"),
        ({"analysis": {"passages": ["python-string-formatting"]}}, "not among its passages"),
        ({"analysis": {"method": "fp16"}}, "'fp16', which boosts no key channel"),
        ({"analysis": {"method": "kitty-100-magnitude"}}, "which boosts every key channel"),
        ({"analysis": {"layer": 99}}, "layer 99, but .* has layers 0 to 29"),
        ({"tokens": 10**7}, r"has \d+ bytes and so cannot give the 10000000 tokens"),
        ({"device": "nosuch"}, "Device 'nosuch' is not known"),
    ],
)
def test_a_wrong_experiment_file_is_refused_in_one_sentence(tmp_path, change, part):
    obtain_embedded(BASE["models"][0])  # so that its number of layers is known
    with pytest.raises(KittyError, match=part):
        experiment(tmp_path, **change)


def test_a_misspelt_key_is_named_even_where_the_right_one_is_missing(tmp_path):
    path = tmp_path / "mine.yaml"
    spelt = {("tokenz" if key == "tokens" else key): value for key, value in BASE.items()}
    path.write_text(yaml.safe_dump(spelt))
    with pytest.raises(KittyError, match="'tokenz' was unexpected"):
        load_experiment(path)


def test_an_unknown_or_unreadable_experiment_is_refused(tmp_path):
    with pytest.raises(KittyError, match=r"use one of ablation.*smoke, tiny"):
        load_experiment("nope")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(KittyError, match="not valid YAML"):
        load_experiment(broken)


def test_an_experiment_file_that_is_not_there_is_told_by_its_path(tmp_path):
    with pytest.raises(KittyError, match=f"no experiment file {tmp_path}/mine.yaml"):
        load_experiment(str(tmp_path / "mine.yaml"))
