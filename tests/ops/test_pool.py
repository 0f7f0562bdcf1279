"""PagePool: pages on demand or up front, shared, freed, exhausted, and counted in bytes."""

from __future__ import annotations

import re

import pytest
import torch

from kitty.cache.pool import PagedLayer, PagePool
from kitty.errors import KittyError
from kitty.pages import PageLayout, tensor_bytes

CPU = torch.device("cpu")
LAYERS = [
    PagedLayer(PageLayout(128, 128, 32), 2, CPU),
    PagedLayer(PageLayout(64, 128, 0), 3, CPU),
]
KEY_BYTES = 2 * 5664 + 3 * (16 * 64 * 2 + 2 * 64 * 2)
VALUE_BYTES = 2 * 4608 + 3 * (16 * 64 * 2 + 2 * 128 * 2)


def test_a_page_costs_its_bytes_in_every_layer() -> None:
    pool = PagePool(LAYERS)
    assert (pool.keys.page_bytes, pool.values.page_bytes) == (KEY_BYTES, VALUE_BYTES)


def test_a_prompt_gets_exactly_the_pages_it_needs() -> None:
    pool = PagePool(LAYERS)
    assert sorted(pool.keys.allocate(5)) == [0, 1, 2, 3, 4]
    assert sorted(pool.values.allocate(3)) == [0, 1, 2]
    assert (pool.keys.capacity, pool.values.capacity) == (5, 3)


def test_all_reachable_tensors_are_the_bytes_of_the_report() -> None:
    pool = PagePool(LAYERS)
    for count in (5, 1, 1, 40, 3):
        pool.keys.allocate(count)
        pool.values.allocate(count)
        assert tensor_bytes(pool.tensors()) == pool.report().total
    assert pool.report_in_use().key_pages == 50 * KEY_BYTES
    assert pool.report_in_use().value_pages == 50 * VALUE_BYTES


def test_growing_keeps_what_pages_hold_and_says_that_addresses_changed() -> None:
    pool = PagePool(LAYERS)
    first = pool.keys.allocate(2)
    generation = pool.keys.generation
    for layer in range(2):
        for part in pool.keys.storage(layer):
            part[first[1]] = 17
    more = pool.keys.allocate(30)
    assert pool.keys.generation > generation
    assert set(more).isdisjoint(first)
    for layer in range(2):
        assert all((part[first[1]] == 17).all() for part in pool.keys.storage(layer))


def test_freed_pages_are_used_again_before_the_pool_grows() -> None:
    pool = PagePool(LAYERS)
    ids = pool.values.allocate(6)
    pool.values.release(ids[2:4])
    assert pool.values.in_use == 4
    assert set(pool.values.allocate(2)) == set(ids[2:4])
    assert pool.values.capacity == 6


def test_a_shared_page_is_freed_with_its_last_reference() -> None:
    pool = PagePool(LAYERS)
    ids = pool.keys.allocate(3)
    pool.keys.retain(ids)
    pool.keys.retain(ids[:1])
    assert pool.keys.shared == 3
    pool.keys.release(ids)
    assert [pool.keys.references(page) for page in ids] == [2, 1, 1]
    pool.keys.release(ids)
    assert pool.keys.in_use == 1
    assert ids[0] not in pool.keys.allocate(5)


def test_a_free_page_can_neither_be_shared_nor_released() -> None:
    pool = PagePool(LAYERS)
    ids = pool.keys.allocate(1)
    pool.keys.release(ids)
    with pytest.raises(RuntimeError, match="free"):
        pool.keys.retain(ids)
    with pytest.raises(RuntimeError, match="once too often"):
        pool.keys.release(ids)


def test_a_reserved_pool_keeps_its_addresses_and_never_grows() -> None:
    pool = PagePool(LAYERS)
    pool.reserve(4, 3)
    addresses = [tensor.data_ptr() for tensor in pool.tensors()]
    pool.keys.allocate(4)
    pool.values.allocate(3)
    assert [tensor.data_ptr() for tensor in pool.tensors()] == addresses
    with pytest.raises(KittyError, match=re.escape(f" {2 * VALUE_BYTES} bytes more")):
        pool.values.allocate(2)
    assert pool.values.in_use == 3


def test_exhaustion_says_how_many_bytes_more_are_needed_and_takes_nothing() -> None:
    pool = PagePool(LAYERS, max_bytes=5 * KEY_BYTES + 2 * VALUE_BYTES + 7)
    pool.values.allocate(2)
    held = pool.keys.allocate(3)
    with pytest.raises(KittyError, match=re.escape(f" {4 * KEY_BYTES} bytes more")):
        pool.keys.allocate(6)
    assert pool.keys.in_use == 3
    assert len(pool.keys.allocate(2)) == 2
    pool.keys.release(held)
    assert len(pool.keys.allocate(3)) == 3


def test_growth_in_reserve_stops_at_the_limit() -> None:
    pool = PagePool(LAYERS, max_bytes=18 * KEY_BYTES)
    pool.keys.allocate(16)
    pool.keys.allocate(1)
    assert pool.keys.capacity == 18
    with pytest.raises(KittyError, match=re.escape(f" {VALUE_BYTES} bytes more")):
        pool.values.allocate(1)


def test_a_device_without_memory_is_exhaustion_and_the_report_stays_true(monkeypatch) -> None:
    pool = PagePool(LAYERS)
    pool.keys.allocate(1)
    create = pool.keys._create

    def fails_for_the_second_layer(layout, *rest):
        if layout.head_dim == 64:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return create(layout, *rest)

    monkeypatch.setattr(pool.keys, "_create", fails_for_the_second_layer)
    with pytest.raises(KittyError, match=re.escape(f" {3 * KEY_BYTES} bytes more")):
        pool.keys.allocate(3)
    assert tensor_bytes(pool.tensors()) == pool.report().total
    monkeypatch.undo()
    assert len(pool.keys.allocate(3)) == 3
    assert tensor_bytes(pool.tensors()) == pool.report().total


def test_layers_may_join_after_pages_were_allocated() -> None:
    pool = PagePool([], max_bytes=10 * KEY_BYTES)
    ids = pool.keys.allocate(4)
    for layer in LAYERS:
        pool.add_layer(layer)
    assert pool.keys.page_bytes == KEY_BYTES
    assert pool.keys.storage(1).words.shape[0] == 4
    assert tensor_bytes(pool.tensors()) == pool.report().total == 4 * KEY_BYTES
    assert set(pool.keys.allocate(3)).isdisjoint(ids)
    assert tensor_bytes(pool.tensors()) == pool.report().total


def test_a_layer_that_no_longer_fits_is_refused_with_the_missing_bytes() -> None:
    first = 2 * 5664
    pool = PagePool([], max_bytes=4 * first + 100)
    pool.keys.allocate(4)
    pool.add_layer(LAYERS[0])
    missing = 4 * (KEY_BYTES - first) - 100
    with pytest.raises(KittyError, match=re.escape(f" {missing} bytes more")):
        pool.add_layer(LAYERS[1])


def test_clearing_frees_all_pages_and_keeps_the_memory() -> None:
    pool = PagePool(LAYERS)
    pool.keys.retain(pool.keys.allocate(4))
    pool.clear()
    assert pool.keys.in_use == 0
    assert sorted(pool.keys.allocate(4)) == [0, 1, 2, 3]
    assert pool.keys.capacity == 4
