"""mamba-align-retire-null-gaps: what a prefill in align mode holds, and for how long."""

import random

import pytest
from pin_api import cache_config, full_attention, mamba, request, sliding_window

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)

BLOCK = 4


def manager_and_pool(
    mode: str = "align", speculative_blocks: int = 0, num_blocks: int = 200
) -> tuple[MambaManager, BlockPool]:
    pool = BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=BLOCK)
    manager = MambaManager(
        mamba(BLOCK, mode, speculative_blocks),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )
    return manager, pool


def schedule(manager: MambaManager, request_id: str, computed: int, target: int, processed: int) -> None:
    """One step in the order of KVCacheManager.allocate_slots."""
    manager.remove_skipped_blocks(request_id, processed)
    manager.get_num_blocks_to_allocate(request_id, target, [], computed, computed, target)
    manager.allocate_new_blocks(request_id, target, target)


def prefill(manager: MambaManager, request_id: str, tokens: int, blocks_a_chunk: int, lag: int) -> int:
    """Prefill with `lag` steps in flight; returns the most states held at once."""
    chunk, most = blocks_a_chunk * BLOCK, 0
    for target in range(chunk, tokens + 1, chunk):
        computed = target - chunk
        schedule(manager, request_id, computed, target, max(0, computed - lag * chunk))
        most = max(most, len(held(manager, request_id)))
    return most


def held(manager: MambaManager, request_id: str) -> list:
    return [block for block in manager.req_to_blocks.get(request_id, []) if not block.is_null]


# --- the defect: each of these fails on a pristine tree ---------------------------------------


def test_states_behind_a_null_gap_are_freed():
    manager, pool = manager_and_pool()
    first, second, last, running = pool.get_new_blocks(4)
    null = pool.null_block
    manager.req_to_blocks["r"] = [null, first, null, second, null, last, null, running]
    free = pool.get_num_free_blocks()

    # 24 tokens are processed: the state at 24 (entry 5) is the one to continue from.
    manager.remove_skipped_blocks("r", processed_computed_tokens=24)

    assert manager.req_to_blocks["r"] == [null] * 5 + [last, null, running]
    assert pool.get_num_free_blocks() == free + 2
    assert (first.ref_cnt, second.ref_cnt, last.ref_cnt, running.ref_cnt) == (0, 0, 1, 1)


@pytest.mark.parametrize("speculative_blocks", [0, 3])
@pytest.mark.parametrize("blocks_a_chunk", [2, 4])
@pytest.mark.parametrize("lag", [1, 2])
def test_a_prefill_with_steps_in_flight_holds_few_states(lag, blocks_a_chunk, speculative_blocks):
    most = []
    for blocks in (16, 160):
        manager, pool = manager_and_pool(speculative_blocks=speculative_blocks)
        idle = pool.get_num_free_blocks()
        most.append(prefill(manager, "r", blocks * BLOCK, blocks_a_chunk, lag))
        manager.free("r")
        assert pool.get_num_free_blocks() == idle

    # The running state, the one before it, the speculative ones, one a chunk in flight.
    assert most == [2 + speculative_blocks + lag] * 2


def test_a_request_that_is_resumed_starts_over():
    """Preempted and resumed under its id, with less computed than was retired before."""
    config = cache_config([full_attention(BLOCK), mamba(BLOCK)], num_blocks=400)
    kv_cache = KVCacheManager(
        config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )
    states = kv_cache.coordinator.single_type_managers[1]
    idle = kv_cache.block_pool.get_num_free_blocks()
    prompt = list(range(40 * BLOCK))

    for life in range(3):
        kv_cache.block_pool.reset_prefix_cache()
        r = request("r", prompt, BLOCK)
        for chunk in range(4 + life):
            kv_cache.new_step_starts()
            assert kv_cache.allocate_slots(r, 4 * BLOCK) is not None
            r.num_computed_tokens += 4 * BLOCK
            r.num_in_flight_tokens = 4 * BLOCK if chunk else 0
            assert len(held(states, "r")) <= 3
        kv_cache.free(r)
        assert kv_cache.block_pool.get_num_free_blocks() == idle
        assert "r" not in states.req_to_blocks


def test_the_retired_prefix_is_not_walked_again():
    class Table(list):
        lowest: int

        def __getitem__(self, key):
            start = key.indices(len(self))[0] if isinstance(key, slice) else key % max(len(self), 1)
            self.lowest = min(self.lowest, start)
            return super().__getitem__(key)

        def __iter__(self):
            self.lowest = 0
            return super().__iter__()

        __reversed__ = None

    manager, pool = manager_and_pool()
    prefill(manager, "r", 40 * BLOCK, blocks_a_chunk=4, lag=1)
    table = manager.req_to_blocks["r"] = Table(manager.req_to_blocks["r"])
    oldest_held = table.index(held(manager, "r")[0])
    for processed in (36 * BLOCK, 36 * BLOCK, 40 * BLOCK):
        table.lowest = len(table)
        manager.remove_skipped_blocks("r", processed)
        assert table.lowest >= oldest_held - 4
    assert len(held(manager, "r")) == 1


# --- guards: these hold on a pristine tree too, and must go on holding ------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_block_is_freed_twice(lag):
    """Random chunks and rollbacks of the processed count, two requests, one pool."""
    rng = random.Random(lag)
    manager, pool = manager_and_pool(speculative_blocks=2, num_blocks=600)
    idle = pool.get_num_free_blocks()
    free_blocks = pool.free_blocks

    def checked_free(blocks):
        blocks = list(blocks)
        assert len({b.block_id for b in blocks if not b.is_null}) == sum(not b.is_null for b in blocks)
        assert all(b.is_null or b.ref_cnt == 1 for b in blocks)
        free_blocks(blocks)

    pool.free_blocks = checked_free
    computed = {"a": [0], "b": [0]}
    for _ in range(300):
        r = rng.choice("ab")
        steps = computed[r]
        if rng.random() < 0.03:
            manager.free(r)
            computed[r] = [0]
            continue
        target = steps[-1] + rng.choice([1, 2, 4]) * BLOCK
        # A rejected draft rolls the processed count back by less than a block.
        processed = max(0, steps[max(0, len(steps) - 1 - lag)] - rng.choice([0, 0, 1, 3]))
        schedule(manager, r, steps[-1], target, processed)
        steps.append(target)
        blocks = held(manager, "a") + held(manager, "b")
        assert len({b.block_id for b in blocks}) == len(blocks)
        assert all(b.ref_cnt == 1 for b in blocks)
        assert pool.get_num_free_blocks() == idle - len(blocks)
    manager.free("a")
    manager.free("b")
    assert pool.get_num_free_blocks() == idle


def test_the_state_to_continue_from_survives_every_lag():
    for lag in (0, 1, 2):
        manager, _ = manager_and_pool(speculative_blocks=3)
        for step in range(1, 12):
            processed = max(0, (step - 1 - lag) * 4 * BLOCK)
            schedule(manager, "r", (step - 1) * 4 * BLOCK, step * 4 * BLOCK, processed)
            table = manager.req_to_blocks["r"]
            # The next chunk to be processed reads the state at the end of the processed
            # prefix; every later chunk end is some in-flight step's state.
            ends = range(max(processed, 4 * BLOCK), step * 4 * BLOCK + 1, 4 * BLOCK)
            assert not any(table[end // BLOCK - 1].is_null for end in ends)


def test_with_synchronous_scheduling_nothing_was_retained_and_nothing_is():
    manager, _ = manager_and_pool(speculative_blocks=3)
    assert prefill(manager, "r", 160 * BLOCK, blocks_a_chunk=4, lag=0) == 2 + 3


def test_a_reused_id_has_no_cursor_of_its_past():
    manager, pool = manager_and_pool()
    prefill(manager, "r", 40 * BLOCK, blocks_a_chunk=4, lag=0)
    manager.free("r")

    manager.req_to_blocks["r"] = pool.get_new_blocks(3)
    manager.remove_skipped_blocks("r", processed_computed_tokens=2 * BLOCK + 1)
    assert [block.is_null for block in manager.req_to_blocks["r"]] == [True, True, False]


def test_blocks_popped_for_a_later_free_leave_no_cursor():
    """The scheduler's deferred free takes the blocks now and returns them later."""
    manager, pool = manager_and_pool()
    idle = pool.get_num_free_blocks()
    prefill(manager, "r", 40 * BLOCK, blocks_a_chunk=4, lag=0)
    popped = manager.pop_blocks_for_free("r")

    manager.req_to_blocks["r"] = pool.get_new_blocks(2)
    manager.remove_skipped_blocks("r", processed_computed_tokens=BLOCK + 1)
    assert manager.req_to_blocks["r"][0].is_null
    manager.free("r")
    pool.free_blocks(reversed(popped))
    assert pool.get_num_free_blocks() == idle


def test_requests_do_not_share_a_cursor():
    manager, pool = manager_and_pool()
    prefill(manager, "long", 40 * BLOCK, blocks_a_chunk=4, lag=0)
    manager.req_to_blocks["short"] = pool.get_new_blocks(2)
    manager.remove_skipped_blocks("short", processed_computed_tokens=BLOCK + 1)
    assert [block.is_null for block in manager.req_to_blocks["short"]] == [True, False]


def test_an_unknown_or_empty_request_is_no_error():
    manager, _ = manager_and_pool()
    manager.remove_skipped_blocks("nobody", processed_computed_tokens=10 * BLOCK)
    schedule(manager, "nobody", 0, BLOCK, 0)
    assert len(held(manager, "nobody")) == 1
    manager.free("nobody")
    manager.free("nobody")


@pytest.mark.parametrize("mode", ["none", "all"])
def test_outside_align_mode_the_walk_still_ends_at_a_null(mode):
    manager, pool = manager_and_pool(mode)
    old, later, running = pool.get_new_blocks(3)
    null = pool.null_block
    manager.req_to_blocks["r"] = [old, null, later, running]
    for _ in range(2):
        manager.remove_skipped_blocks("r", processed_computed_tokens=3 * BLOCK + 1)
        assert manager.req_to_blocks["r"] == [old, null, null, running]
    assert (old.ref_cnt, later.ref_cnt, running.ref_cnt) == (1, 0, 1)


@pytest.mark.parametrize("mode", ["none", "all"])
def test_outside_align_mode_the_same_calls_give_the_same_blocks(mode):
    """Against the base class's own remover, over a whole prefill and decode."""
    tables = []
    for remover in (MambaManager._remove_blocks_in_range, SingleTypeKVCacheManager._remove_blocks_in_range):
        manager, pool = manager_and_pool(mode, speculative_blocks=2)
        manager._remove_blocks_in_range = remover.__get__(manager)
        seen = []
        for target in [*range(16, 161, 16), *range(161, 175)]:
            schedule(manager, "r", target - 1, target, max(0, target - 20))
            seen.append(([b.block_id for b in manager.req_to_blocks["r"]], pool.get_num_free_blocks()))
        tables.append(seen)
    assert tables[0] == tables[1]


def test_other_managers_keep_the_base_remover():
    for manager in (FullAttentionManager, SlidingWindowManager):
        assert manager._remove_blocks_in_range is SingleTypeKVCacheManager._remove_blocks_in_range
    pool = BlockPool(num_gpu_blocks=20, enable_caching=True, hash_block_size=BLOCK)
    window = SlidingWindowManager(
        sliding_window(BLOCK, BLOCK),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )
    old, later, inside = pool.get_new_blocks(3)
    window.req_to_blocks["r"] = [old, pool.null_block, later, inside]
    window.remove_skipped_blocks("r", processed_computed_tokens=4 * BLOCK)
    assert window.req_to_blocks["r"] == [old, pool.null_block, pool.null_block, inside]


def test_a_retired_state_can_still_be_hit():
    """Retiring returns a block to the pool; it does not take it out of the prefix cache."""
    config = cache_config([full_attention(BLOCK), mamba(BLOCK)], num_blocks=400)
    kv_cache = KVCacheManager(
        config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )
    prompt = list(range(40 * BLOCK))
    r = request("r", prompt, BLOCK)
    for chunk in range(10):
        kv_cache.new_step_starts()
        assert kv_cache.allocate_slots(r, 4 * BLOCK) is not None
        r.num_computed_tokens += 4 * BLOCK
        r.num_in_flight_tokens = 4 * BLOCK if chunk else 0
    kv_cache.new_step_starts()

    # A prompt that parts from the first after 12 blocks: the state at block 12 is long retired.
    again = request("again", prompt[: 12 * BLOCK] + [7777] * BLOCK, BLOCK)
    assert kv_cache.get_computed_blocks(again)[1] == 12 * BLOCK
