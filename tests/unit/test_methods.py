"""Methods as data: what the shipped file means, and what a wrong one says."""

import pytest
import yaml

from kitty import KittyError, get_method, load_methods
from kitty.paths import configs_dir


def test_named_methods_have_the_bits_and_sinks_of_the_paper() -> None:
    expected = {
        "fp16": (16, 16, 0.0, 32),
        "kivi-k4v4": (4, 4, 0.0, 0),
        "kivi-k2v2": (2, 2, 0.0, 0),
        "kivi-k2v2-sink": (2, 2, 0.0, 32),
        "kivi-k2v4-sink": (2, 4, 0.0, 32),
        "kivi-k4v2-sink": (4, 2, 0.0, 32),
        "kitty": (2, 2, 0.125, 32),
        "kitty-pro": (2, 2, 0.25, 32),
    }
    for name, fields in expected.items():
        method = get_method(name)
        assert (method.key_bits, method.value_bits, method.boost_ratio, method.sink) == fields
        assert (method.window, method.page_size, method.rollback) == (128, 128, 0)


def test_the_sweep_holds_every_eighth_for_every_selection() -> None:
    methods = load_methods()
    for percent in ("0", "12.5", "25", "37.5", "50", "62.5", "75", "87.5", "100"):
        for selection in ("magnitude", "random", "variance", "rotary"):
            method = methods[f"kitty-{percent}-{selection}"]
            assert method.boost_ratio == float(percent) / 100
            assert method.selection == selection


@pytest.mark.parametrize(
    ("ratio", "head_dim", "count"),
    [
        (0.125, 128, 16),
        (0.25, 128, 32),
        (0.125, 80, 10),
        (0.125, 100, 13),
        (0.0, 64, 0),
        (1, 96, 96),
    ],
)
def test_boosted_channels_round_half_up(ratio: float, head_dim: int, count: int) -> None:
    assert get_method("kitty", boost_ratio=ratio).num_boosted(head_dim) == count


@pytest.mark.parametrize(
    ("length", "key_pages", "value_pages"),
    [(0, 0, 0), (159, 0, 0), (160, 1, 0), (287, 1, 0), (288, 2, 1), (416, 3, 2), (8192, 63, 62)],
)
def test_page_counts_follow_the_length(length: int, key_pages: int, value_pages: int) -> None:
    method = get_method("kitty-pro")
    assert (method.key_pages(length), method.value_pages(length)) == (key_pages, value_pages)


def test_rollback_delays_every_page_by_itself() -> None:
    method = get_method("kitty-pro", rollback=5)
    assert (method.key_pages(164), method.key_pages(165)) == (0, 1)
    assert (method.value_pages(292), method.value_pages(293)) == (0, 1)


def test_effective_bits_are_those_of_the_format() -> None:
    # 5664 and 4608 bytes per page of 128 x 128 elements
    keys, values = get_method("kitty-pro").bits_per_element(128)
    assert keys * 128 * 128 / 8 == 5664
    assert values * 128 * 128 / 8 == 4608
    assert get_method("fp16").bits_per_element(128) == (16, 16)


@pytest.mark.parametrize(
    ("name", "packable"),
    [
        ("kitty", True),
        ("kitty-pro", True),
        ("kivi-k2v2", True),
        ("kivi-k4v2-sink", True),
        ("kitty-37.5-variance", True),
        ("fp16", False),
        ("kivi-k4v4", False),
        ("kivi-k2v4-sink", False),
        ("kitty-plus", True),
        ("k1v2-sink", False),
    ],
)
def test_the_packed_cache_holds_two_bit_values_and_boosted_two_bit_keys(
    name: str, packable: bool
) -> None:
    assert (get_method(name).packed_reason() is None) == packable


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boost_ratio": 1.5}, ("boost_ratio", "1.5", "0 to 1")),
        ({"boost_ratio": float("nan")}, ("boost_ratio", "nan")),
        ({"key_bits": 0}, ("key_bits", "0", "1 to 8")),
        ({"value_bits": 9}, ("value_bits", "9", "1 to 8")),
        ({"selection": "best"}, ("best", "magnitude")),
        ({"page_size": 0}, ("page_size", "0")),
        ({"sink": -1}, ("sink", "-1")),
        ({"boost_bits": 1}, ("boost_bits", "1", "key_bits 2")),
        ({"key_bits": 16}, ("boost_bits", "4", "key_bits 16", "boost_ratio to 0")),
        ({"seed": 2**32}, ("seed", "4294967296", "2^32")),
        ({"colour": 3}, ("colour", "settings")),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_limit(
    changes: dict, words: tuple[str, ...]
) -> None:
    with pytest.raises(KittyError) as caught:
        get_method("kitty", **changes)
    assert all(word in str(caught.value) for word in words)


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(KittyError, match=r"'kity' is not known: use one of fp16, .*kitty-pro"):
        get_method("kity")


def test_a_page_size_that_does_not_divide_the_head_is_refused() -> None:
    with pytest.raises(KittyError, match="page_size 48 does not divide head_dim 64"):
        get_method("kitty", page_size=48).value_group(64)


@pytest.mark.parametrize(
    "text", ["methods: [", "methods: {a: {title: A, key_bits: 2}}", "- 1", "methods: {}"]
)
def test_a_broken_methods_file_is_named(tmp_path, text: str) -> None:
    path = tmp_path / "methods.yaml"
    path.write_text(text)
    with pytest.raises(KittyError, match=r"methods\.yaml"):
        load_methods(path)


def test_a_methods_file_that_is_no_text_is_named(tmp_path) -> None:
    path = tmp_path / "methods.yaml"
    path.write_bytes(b"\x80\xff")
    with pytest.raises(KittyError, match=r"methods\.yaml is not valid YAML"):
        load_methods(str(path))


def test_a_misspelt_field_of_a_method_is_named_with_its_place(tmp_path) -> None:
    raw = yaml.safe_load((configs_dir() / "methods.yaml").read_text())
    raw["methods"]["kitty"]["key_bitz"] = raw["methods"]["kitty"].pop("key_bits")
    path = tmp_path / "methods.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(KittyError, match=r"wrong at methods/kitty: .*'key_bitz' was unexpected"):
        load_methods(path)


def test_each_number_of_the_method_stands_once() -> None:
    raw = yaml.safe_load((configs_dir() / "methods.yaml").read_text())
    repeated = [
        (name, key)
        for name, spec in raw["methods"].items()
        for key, value in spec.items()
        if raw["defaults"].get(key, object()) == value
    ]
    assert repeated == []
