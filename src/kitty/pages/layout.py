"""Sizes of packed pages and of the 16-bit buffers: shapes, dtypes and bytes for any method.

Nothing else in the project knows them; kernels get them from here as compile-time constants.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from kitty.errors import KittyError
from kitty.methods import PACKED_BITS, PACKED_PAGE_MULTIPLE, Method

PLANES = 8  # 2-bit fields of a 16-bit word
PLANE_BITS = PACKED_BITS
HEAD_DIM_MULTIPLE = 16
MAX_HEAD_DIM = 256  # boosted channels are stored as uint8
NO_PAGE = -1  # page id of a table entry without a page

Part = tuple[tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Shape of one packed page of one KV head (paper section 5; see the package docstring).

    Attributes:
        head_dim: channels D of a head, a multiple of 16 up to 256.
        page_size: tokens G of a page, a multiple of 128.
        num_boosted: channels D_boost of a key page that hold 4 bits, 0 to ``head_dim``.

    Raises:
        KittyError: a size that the format cannot hold.
    """

    head_dim: int
    page_size: int = 128
    num_boosted: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.head_dim <= MAX_HEAD_DIM or self.head_dim % HEAD_DIM_MULTIPLE:
            raise KittyError(
                f"head_dim is {self.head_dim}, but packed pages hold multiples of "
                f"{HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}: use the simulated cache for this model."
            )
        if self.page_size <= 0 or self.page_size % PACKED_PAGE_MULTIPLE:
            raise KittyError(
                f"page_size is {self.page_size}, but a packed page holds a multiple of "
                f"{PACKED_PAGE_MULTIPLE} tokens: use 128 or 256, or the simulated cache."
            )
        if not 0 <= self.num_boosted <= self.head_dim:
            raise KittyError(
                f"num_boosted is {self.num_boosted}, but a page has {self.head_dim} channels: "
                "choose a boost_ratio from 0 to 1."
            )
        if self.head_dim % self.value_group:
            raise KittyError(
                f"head_dim {self.head_dim} is no multiple of page_size {self.page_size}: "
                "choose a larger page_size, so that one value group holds the whole head."
            )

    @classmethod
    def of(cls, method: Method, head_dim: int) -> PageLayout:
        """Layout of ``method``'s pages for heads of ``head_dim`` channels.

        Uniform 4-bit keys are pages with every channel boosted.

        Raises:
            KittyError: the packed cache cannot hold the method or the head.
        """
        reason = method.packed_reason()
        if reason is not None:
            raise KittyError(
                f"Method {method.name!r} cannot be packed, because its {reason}: "
                "use the simulated cache."
            )
        uniform = method.key_bits == PLANE_BITS * 2
        num_boosted = head_dim if uniform else method.num_boosted(head_dim)
        return cls(head_dim, method.page_size, num_boosted)

    @property
    def word_rows(self) -> int:
        """Words of one channel of a page; also the distance in tokens of a word's planes."""
        return self.page_size // PLANES

    @property
    def value_group(self) -> int:
        """Channels g that share a value scale and zero."""
        return min(self.head_dim, self.page_size)

    @property
    def value_groups(self) -> int:
        """Value groups of one token."""
        return self.head_dim // self.value_group

    def key_parts(self) -> dict[str, Part]:
        """Shape and dtype of each tensor of one key page of one KV head."""
        return {
            "words": ((self.word_rows, self.head_dim), torch.int16),
            "high": ((self.word_rows, self.num_boosted), torch.int16),
            "meta": ((2, self.head_dim), torch.float16),
            "boosted": ((self.num_boosted,), torch.uint8),
        }

    def value_parts(self) -> dict[str, Part]:
        """Shape and dtype of each tensor of one value page of one KV head."""
        return {
            "words": ((self.word_rows, self.head_dim), torch.int16),
            "meta": ((2, self.value_groups, self.page_size), torch.float16),
        }

    @property
    def key_page_bytes(self) -> int:
        """Bytes of one key page of one KV head (Kitty-Pro, D = G = 128: 5664)."""
        return sum(_part_bytes(part) for part in self.key_parts().values())

    @property
    def value_page_bytes(self) -> int:
        """Bytes of one value page of one KV head (D = G = 128: 4608)."""
        return sum(_part_bytes(part) for part in self.value_parts().values())


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """Shape of one layer's 16-bit buffers: sink, key ring and value ring.

    Attributes:
        head_dim: channels D of a head.
        page_size, sink, window, rollback: G, S, R, r of the method.
        largest_call: most tokens that one call may insert, the first call (which writes its
            pages from the dense tensors) excepted.
    """

    head_dim: int
    page_size: int
    sink: int
    window: int
    rollback: int = 0
    largest_call: int = 1

    @classmethod
    def of(cls, method: Method, head_dim: int, largest_call: int = 1) -> BufferLayout:
        """Buffers of ``method`` for heads of ``head_dim`` channels."""
        return cls(
            head_dim, method.page_size, method.sink, method.window, method.rollback, largest_call
        )

    @property
    def key_ring(self) -> int:
        """Slots CK of the key ring.

        A call of T tokens on a sequence of c needs the tokens from the end of page kp(c) on:
        at most G - 1 + r + T. A crop by r right after it needs those from kp(c + T - r) on: at
        most G - 1 + 2r when T < r.
        """
        return self.page_size + self.rollback + max(self.largest_call, self.rollback, 1)

    @property
    def value_ring(self) -> int:
        """Slots CV of the value ring: the key ring's and the local window."""
        return self.window + self.key_ring

    def parts(self, batch: int, heads: int, dtype: torch.dtype) -> dict[str, Part]:
        """Shape and dtype of each buffer of a layer with ``heads`` KV heads."""
        sizes = {
            "sink_k": self.sink,
            "sink_v": self.sink,
            "key_ring": self.key_ring,
            "value_ring": self.value_ring,
        }
        return {name: ((batch, heads, size, self.head_dim), dtype) for name, size in sizes.items()}

    def num_bytes(self, batch: int, heads: int, dtype: torch.dtype) -> int:
        """Bytes of one layer's buffers."""
        return sum(_part_bytes(part) for part in self.parts(batch, heads, dtype).values())


def _part_bytes(part: Part) -> int:
    shape, dtype = part
    return math.prod(shape) * dtype.itemsize
