"""What differs between the pins that these tests run on, in one place."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request


def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call `function` with those of `kwargs` that this pin's version knows."""
    known = inspect.signature(function).parameters
    return function(*args, **{k: v for k, v in kwargs.items() if k in known})


def full_attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def sliding_window(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
    )


def mamba(block_size: int, mode: str = "align", speculative_blocks: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((1, 1),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=speculative_blocks,
    )


def cache_config(specs: list, num_blocks: int, draft_groups: tuple[int, ...] = ()) -> KVCacheConfig:
    """One KV cache group a spec; those in `draft_groups` are annotated as the drafter's."""
    groups = [
        KVCacheGroupSpec([f"layer{i}"], spec, is_eagle_group=i in draft_groups) for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


init_none_hash(sha256)  # once: it may be random, and hashes chain from it


def request(request_id: str, tokens: list[int], hash_block_size: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1000),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
    )


def cpu_tier(num_chunks: int) -> CPUOffloadingManager:
    return call(CPUOffloadingManager, num_blocks=num_chunks, num_chunks=num_chunks)


def serve_config(mtp: bool) -> SimpleNamespace:
    """The part of VllmConfig that the connector's scheduler side reads."""
    speculative = SimpleNamespace(
        method="mtp",
        num_speculative_tokens=3,
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
    )
    return SimpleNamespace(
        speculative_config=speculative if mtp else None,
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_cache_retention_interval=None),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
    )


def offloading_spec(
    config: KVCacheConfig, manager: Any, tokens_per_hash: int, prompt_only: bool = True
) -> SimpleNamespace:
    """An OffloadingSpec by shape: one GPU block a chunk, `manager` as the tier."""
    blocks = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    return SimpleNamespace(
        config=SimpleNamespace(
            groups=tuple(SimpleNamespace(group_id=i, tokens_per_block=n) for i, n in enumerate(blocks))
        ),
        tokens_per_block=tuple(blocks),
        tokens_per_hash=tokens_per_hash,
        blocks_per_chunk=1,
        offload_prompt_only=prompt_only,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False),
        get_manager=lambda: manager,
    )


def step_output(
    kv_cache: Any = None,
    new: dict[str, tuple[list[int], ...]] | None = None,
    running: dict[str, tuple[list[int], ...] | None] | None = None,
    tokens: dict[str, int] | None = None,
    finished: set[str] = frozenset(),
) -> SchedulerOutput:
    """What the scheduler would hand to the connector for one step."""
    running = running or {}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [SimpleNamespace(req_id=r, block_ids=b) for r, b in (new or {}).items()]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(running),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=list(running.values()),
        num_computed_tokens=[0] * len(running),
        num_output_tokens=[0] * len(running),
    )
    output.num_scheduled_tokens = tokens or {}
    output.finished_req_ids = set(finished)
    # From 0.29 an align-mode state reaches the connector as a hand-off with its
    # exact block; before, it is found in the request's block table.
    if kv_cache is not None and hasattr(kv_cache, "take_boundary_state_offloads"):
        offloads = kv_cache.take_boundary_state_offloads()
        output.kv_connector_block_state = SimpleNamespace(boundary_state_offloads=offloads)
    return output
