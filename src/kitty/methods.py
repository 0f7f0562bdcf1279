"""Quantization methods as data: the Method dataclass and its loader.

Every number of a method comes from configs/methods.yaml; every count of pages comes from here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

from kitty.config_files import load_config
from kitty.errors import KittyError
from kitty.paths import configs_dir

SELECTIONS = ("magnitude", "random", "variance", "rotary")
UNQUANTIZED_BITS = 16
SEEDS = 1 << 32  # the hash of the random selection takes 32 bits
PACKED_BITS = 2
PACKED_BOOST_BITS = 4
PACKED_PAGE_MULTIPLE = 128  # a packed page is 8 planes of a multiple of 16 tokens


@dataclasses.dataclass(frozen=True)
class Method:
    """How keys and values of one KV cache are stored (arXiv:2511.18643, sections 3 and 4).

    Attributes:
        name: identifier used on the command line and in file names.
        title: label in tables and figures.
        key_bits, value_bits: bits per element of a full page, 1 to 8, or 16 for no quantization.
        boost_ratio: share of each page's key channels stored with ``boost_bits``, 0 to 1.
        boost_bits: bits of the boosted channels.
        selection: rule that chooses them: ``magnitude``, ``random``, ``variance`` or ``rotary``.
        sink: leading tokens kept in 16 bit (S).
        window: local window, most recent values kept in 16 bit besides the q-buffer (R).
        page_size: tokens of one page (G).
        rollback: tokens that may be taken back (r); every count uses the length minus r.
        seed: of the random selection, below 2^32.

    Raises:
        KittyError: a field is out of its range.
    """

    name: str
    title: str
    key_bits: int
    value_bits: int
    boost_ratio: float
    boost_bits: int
    selection: str
    sink: int
    window: int
    page_size: int
    rollback: int
    seed: int

    def __post_init__(self) -> None:
        for field in ("key_bits", "value_bits"):
            _check_bits(field, getattr(self, field), allow_16=True)
        _check_bits("boost_bits", self.boost_bits, allow_16=False)
        if isinstance(self.boost_ratio, bool) or not isinstance(self.boost_ratio, int | float):
            raise KittyError(f"boost_ratio must be a number from 0 to 1, not {self.boost_ratio!r}.")
        if not 0.0 <= self.boost_ratio <= 1.0:
            raise KittyError(
                f"boost_ratio is {self.boost_ratio}, but it is a share of the key channels: "
                "give a number from 0 to 1, for example 0.125 for Kitty."
            )
        if self.selection not in SELECTIONS:
            raise KittyError(
                f"selection is {self.selection!r}, which is not known: use one of "
                f"{', '.join(SELECTIONS)}."
            )
        for field, least in (("sink", 0), ("window", 0), ("rollback", 0), ("seed", 0)):
            _check_count(field, getattr(self, field), least)
        _check_count("page_size", self.page_size, 1)
        if self.num_boosted(1024) and self.boost_bits < self.key_bits:
            raise KittyError(
                f"boost_bits is {self.boost_bits}, below key_bits {self.key_bits}: boosted "
                "channels need at least as many bits as the others, so raise boost_bits or set "
                "boost_ratio to 0."
            )
        if self.seed >= SEEDS:
            raise KittyError(f"seed is {self.seed}, but it must be below 2^32 = {SEEDS}.")

    @property
    def quantizes_keys(self) -> bool:
        """Whether full key pages are quantized."""
        return self.key_bits < UNQUANTIZED_BITS

    @property
    def quantizes_values(self) -> bool:
        """Whether full value pages are quantized."""
        return self.value_bits < UNQUANTIZED_BITS

    @property
    def quantized(self) -> bool:
        """Whether anything is quantized at all."""
        return self.quantizes_keys or self.quantizes_values

    def num_boosted(self, head_dim: int) -> int:
        """Number of boosted key channels D_boost of a head with ``head_dim`` channels."""
        return math.floor(self.boost_ratio * head_dim + 0.5)

    def key_pages(self, length: int) -> int:
        """Quantized key pages of a sequence of ``length`` tokens, kp(n)."""
        if not self.quantizes_keys:
            return 0
        return max(0, length - self.sink - self.rollback) // self.page_size

    def value_pages(self, length: int) -> int:
        """Quantized value pages of a sequence of ``length`` tokens, vp(n)."""
        if not self.quantizes_values:
            return 0
        return max(0, length - self.sink - self.window - self.rollback) // self.page_size

    def value_group(self, head_dim: int) -> int:
        """Channels that share one value scale and zero: min(head_dim, page_size).

        Raises:
            KittyError: the group does not divide ``head_dim``.
        """
        group = min(head_dim, self.page_size)
        if head_dim % group:
            raise KittyError(
                f"page_size {self.page_size} does not divide head_dim {head_dim}: values are "
                "quantized in groups of min(head_dim, page_size) channels, so choose a page_size "
                "that divides the head_dim or exceeds it."
            )
        return group

    def packed_reason(self) -> str | None:
        """Why the packed 2-bit cache cannot hold this method; None where it can."""
        if self.value_bits != PACKED_BITS:
            return f"values have {self.value_bits} bits"
        if self.key_bits == PACKED_BOOST_BITS and self.boost_ratio == 0:
            pass  # uniform 4-bit keys are held as 2-bit keys with every channel boosted
        elif self.key_bits != PACKED_BITS:
            return f"keys have {self.key_bits} bits"
        elif self.boost_ratio > 0 and self.boost_bits != PACKED_BOOST_BITS:
            return f"boosted channels have {self.boost_bits} bits"
        if self.page_size % PACKED_PAGE_MULTIPLE:
            return f"page_size {self.page_size} is no multiple of {PACKED_PAGE_MULTIPLE}"
        return None

    def bits_per_element(self, head_dim: int) -> tuple[float, float]:
        """Stored bits per key and per value element of full pages, scales, zeros, list included.

        Codes plus an fp16 scale and zero per group, plus one byte per boosted channel and page
        (section 4 of the paper gives the layout; its "nearly 8x" counts the codes alone).
        """
        boosted = self.num_boosted(head_dim) / head_dim
        key = value = float(UNQUANTIZED_BITS)
        if self.quantizes_keys:
            codes = self.key_bits + (self.boost_bits - self.key_bits) * boosted
            key = codes + (32 + 8 * boosted) / self.page_size
        if self.quantizes_values:
            value = self.value_bits + 32 / self.value_group(head_dim)
        return key, value

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> Method:
        """A copy with some fields changed; its name says so unless a name is given."""
        unknown = sorted(set(changes) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            raise KittyError(
                f"{unknown[0]!r} is no setting of a method: the settings are "
                f"{', '.join(f.name for f in dataclasses.fields(self) if f.name != 'name')}."
            )
        changes = {k: v for k, v in changes.items() if v is not None and v != getattr(self, k)}
        if changes and "name" not in changes:
            changes["name"] = "+".join([self.name, *(f"{k}={v}" for k, v in changes.items())])
            changes.setdefault("title", changes["name"])
        return dataclasses.replace(self, **changes)


def _check_bits(field: str, bits: object, *, allow_16: bool) -> None:
    whole = isinstance(bits, int) and not isinstance(bits, bool)
    if whole and (1 <= bits <= 8 or (allow_16 and bits == UNQUANTIZED_BITS)):  # type: ignore[operator]
        return
    limit = "1 to 8, or 16 for no quantization" if allow_16 else "1 to 8"
    raise KittyError(f"{field} is {bits!r}, but it must be {limit}.")


def _check_count(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise KittyError(
            f"{field} is {value!r}, but it must be a whole number of at least {least}."
        )


def sweep_name(prefix: str, ratio: float, selection: str) -> str:
    """Name of a sweep's method, for example ``kitty-12.5-random``."""
    return f"{prefix}-{ratio * 100:g}-{selection}"


@functools.cache
def load_methods(path: str | Path | None = None) -> dict[str, Method]:
    """All methods of a methods file, by name, in the file's order.

    Args:
        path: a YAML file in the form of configs/methods.yaml; default: the shipped one.

    Raises:
        KittyError: the file is missing, is no YAML, or breaks the schema.
    """
    raw = load_config("methods", Path(path or configs_dir() / "methods.yaml"))
    methods = {
        name: Method(**{**raw["defaults"], **spec, "name": name})
        for name, spec in raw["methods"].items()
    }
    for sweep in raw.get("sweeps", []):
        methods.update(_expand_sweep({**raw["defaults"], **sweep}))
    return methods


def _expand_sweep(sweep: dict[str, Any]) -> dict[str, Method]:
    prefix, title = sweep.pop("prefix"), sweep.pop("title")
    ratios, selections = sweep.pop("boost_ratio"), sweep.pop("selection")
    expanded = {}
    for selection in selections:
        for ratio in ratios:
            name = sweep_name(prefix, ratio, selection)
            label = f"{title} {ratio * 100:g}% ({selection})"
            expanded[name] = Method(
                name=name, title=label, boost_ratio=ratio, selection=selection, **sweep
            )
    return expanded


def get_method(name: str | Method, **overrides: Any) -> Method:
    """A method by name, with fields changed by ``overrides``.

    Raises:
        KittyError: the name or a field is unknown, or a value is out of range.
    """
    if isinstance(name, Method):
        return name.replace(**overrides)
    methods = load_methods()
    if name not in methods:
        named = [known for known in methods if "%" not in methods[known].title]
        raise KittyError(
            f"Method {name!r} is not known: use one of {', '.join(named)}, or a sweep name such "
            "as kitty-37.5-random; `kitty methods` lists all."
        )
    return methods[name].replace(**overrides)
