"""offload-mtp-serve: what a hybrid model under MTP stores in the CPU tier, and what it gets back.

The connector's scheduler side, the KV cache manager and the CPU tier's manager are vLLM's own.
`Engine` plays the rest: the scheduling loop for one request at a time, and a GPU whose blocks
hold the tokens that were really written to them, so that a transfer is judged by its content.
"""

from types import SimpleNamespace

import pytest
from pin_api import (
    cache_config,
    cpu_tier,
    full_attention,
    mamba,
    offloading_spec,
    request,
    serve_config,
    sliding_window,
    step_output,
)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    SchedulerOffloadConfig,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, get_offload_group_idx, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

B = 16
K = 3  # speculative tokens
CHUNK = 4  # blocks a prefill chunk


class Engine:
    def __init__(self, specs, mtp, draft_groups=(), prompt_only=True, num_blocks=200):
        self.config = cache_config(specs, num_blocks, draft_groups)
        self.mtp = mtp
        self.kv = KVCacheManager(
            self.config,
            max_model_len=4096,
            scheduler_block_size=B,
            hash_block_size=B,
            enable_caching=True,
            use_eagle=mtp,
        )
        self.tier = cpu_tier(500)
        self.connector = OffloadingConnectorScheduler(
            offloading_spec(self.config, self.tier, B, prompt_only), serve_config(mtp), self.config
        )
        self.gpu: dict[tuple[int, int], dict[int, int]] = {}  # (group, block) -> position -> token
        self.cpu: dict[int, dict[int, int]] = {}
        self.stored: list[tuple[int, dict[int, int]]] = []
        self.loaded: list[tuple[int, int]] = []  # (group, block index)
        self.request = None

    # -- one request -------------------------------------------------------------------------

    def start(self, request_id, prompt):
        """Admit a request; returns (tokens cached on the GPU, tokens served by the tier)."""
        r = self.request = request(request_id, prompt, B)
        self.connector.on_new_request(r)
        self.kv.new_step_starts()
        blocks, local, *_ = self.kv.get_computed_blocks(r)
        external, asynchronous = self.connector.get_num_new_matched_tokens(r, local)
        self.started = False
        self.hit = local, blocks
        if external:
            assert asynchronous
            assert self.kv.allocate_slots(
                r,
                0,
                num_new_computed_tokens=local,
                new_computed_blocks=blocks,
                num_external_computed_tokens=external,
                delay_cache_blocks=True,
            )
            self.connector.update_state_after_alloc(r, self.kv.get_blocks(request_id), external)
            self._step()
            r.num_computed_tokens = local + external
            self.kv.cache_blocks(r, r.num_computed_tokens)
        return local, external

    def prefill(self):
        """Chunks as the scheduler cuts them in align mode."""
        r = self.request
        last = max(r.num_prompt_tokens // B * B - (B if self.mtp else 0), 0)
        while r.num_computed_tokens < r.num_prompt_tokens:
            start = r.num_computed_tokens or self.hit[0]
            end = min(start + CHUNK * B, r.num_prompt_tokens)
            if start < last < end:
                end = last
            self._schedule(start, r.all_token_ids[start:end])

    def decode(self, outputs, accepted=0):
        """Sample `outputs`, `accepted` drafts a step; MTP writes rejected drafts too."""
        r, outputs = self.request, list(outputs)
        r.append_output_token_ids(outputs.pop(0))
        while outputs:
            known = r.num_tokens
            took = min(accepted, len(outputs) - 1)
            drafts = outputs[:took] + [-1] * (K - took) if self.mtp else []
            self._schedule(known - 1, [r.all_token_ids[known - 1], *drafts])
            r.num_computed_tokens = known + took
            for token in outputs[: took + 1]:
                r.append_output_token_ids(token)
            del outputs[: took + 1]

    def finish(self, status=RequestStatus.FINISHED_STOPPED):
        r = self.request
        r.status = status
        self.connector.request_finished(r)
        self.kv.free(r)
        self._step(finished={r.request_id})

    def run(self, request_id, prompt, outputs=(1,)):
        hit = self.start(request_id, prompt)
        self.prefill()
        self.decode(outputs)
        self.finish()
        return hit

    # -- the machine -------------------------------------------------------------------------

    def _schedule(self, start, tokens):
        r = self.request
        self.kv.new_step_starts()
        arguments = {}
        if start and r.num_computed_tokens == 0:
            arguments = {"num_new_computed_tokens": self.hit[0], "new_computed_blocks": self.hit[1]}
        lookahead = K if self.mtp else 0
        new = self.kv.allocate_slots(r, len(tokens), num_lookahead_tokens=lookahead, **arguments)
        assert new is not None
        ids = {r.request_id: self.kv.get_block_ids(r.request_id)}
        if self.started:
            ids = {r.request_id: new.get_block_ids()}
        self._write(start, tokens)
        self._step(**{"running" if self.started else "new": ids}, tokens={r.request_id: len(tokens)})
        self.started = True
        r.num_computed_tokens = start + len(tokens)

    def _write(self, start, tokens):
        """What the forward pass leaves in the request's blocks."""
        for group, table in enumerate(self.kv.get_blocks(self.request.request_id).blocks):
            if isinstance(self.config.kv_cache_groups[group].kv_cache_spec, MambaSpec):
                # One state: all of the prefix, at the entry of its last token.
                end = start + len(tokens)
                prefix = dict(enumerate([*self.request.all_token_ids[:start], *tokens]))
                self.gpu[group, table[(end - 1) // B].block_id] = prefix
                continue
            for position, token in enumerate(tokens, start):
                key = group, table[position // B].block_id
                if position % B == 0:
                    self.gpu[key] = {}
                self.gpu.setdefault(key, {})[position] = token

    def _step(self, **what):
        self.kv.new_step_starts()
        meta = self.connector.build_connector_meta(step_output(self.kv, **what))
        for job in meta.load_jobs.values():
            for group, index, gpu, cpu in self._pairs(job.dst_spec, job.src_spec):
                self.loaded.append((group, index))
                self.gpu[group, gpu] = self.cpu[cpu]
        for job_id, job in meta.store_jobs.items():
            keys = self.connector._jobs[job_id].keys
            for group, _, gpu, cpu in self._pairs(job.src_spec, job.dst_spec):
                self.cpu[cpu] = self.gpu.get((group, gpu), {})
                self.stored.append((group, self.cpu[cpu]))
            assert {get_offload_group_idx(key) for key in keys} <= set(range(len(self.config.kv_cache_groups)))
        done = dict.fromkeys([*meta.load_jobs, *meta.store_jobs], 1)
        if done:
            self.connector.update_connector_output(
                KVConnectorOutput(kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=done))
            )

    @staticmethod
    def _pairs(gpu: GPULoadStoreSpec, cpu):
        cpu_ids = iter(cpu.block_ids.tolist())
        gpu_ids = iter(gpu.block_ids.tolist())
        for group, (size, first) in enumerate(zip(gpu.group_sizes, gpu.block_indices)):
            for i in range(size):
                yield group, first + i, next(gpu_ids), next(cpu_ids)


def hybrid(mtp: bool, **kwargs) -> Engine:
    return Engine([full_attention(B), mamba(B, "align", K if mtp else 0)], mtp, **kwargs)


def evict_gpu(engine: Engine) -> None:
    assert engine.kv.block_pool.reset_prefix_cache()


# --- a group that nothing annotates as draft is none ------------------------------------------


@pytest.mark.parametrize("blocks", [3, 4, 7, 8, 11, 12])
def test_a_hybrid_model_under_mtp_is_served_from_the_tier(blocks):
    engine = hybrid(mtp=True)
    prompt = list(range(blocks * B + 5))
    assert engine.run("first", prompt) == (0, 0)
    evict_gpu(engine)

    # All but the partial block and the one whose state MTP's chunking leaves out.
    hit = blocks - 1
    assert engine.start("again", prompt) == (0, hit * B)
    assert engine.loaded == [(0, i) for i in range(hit)] + [(1, hit - 1)]


def test_what_the_tier_serves_is_what_was_computed():
    engine = hybrid(mtp=True)
    prompt = list(range(12 * B + 5))
    engine.run("first", prompt)
    evict_gpu(engine)
    engine.gpu.clear()
    _, external = engine.start("again", prompt)
    assert external

    attention, states = engine.kv.get_blocks("again").blocks
    for index in range(external // B):
        positions = range(index * B, (index + 1) * B)
        assert engine.gpu[0, attention[index].block_id] == {p: prompt[p] for p in positions}
    assert engine.gpu[1, states[external // B - 1].block_id] == dict(enumerate(prompt[:external]))


def test_the_tier_serves_on_from_what_the_gpu_kept():
    engine = hybrid(mtp=True)
    prompt = list(range(12 * B + 5))
    engine.run("first", prompt)
    evict_gpu(engine)
    assert engine.run("part", prompt[: 9 * B + 5]) == (0, 8 * B)
    engine.loaded.clear()
    assert engine.start("again", prompt) == (8 * B, 3 * B)
    assert engine.loaded == [(0, 8), (0, 9), (0, 10), (1, 10)]


def test_only_annotated_groups_are_draft_groups():
    specs = [full_attention(B), full_attention(B), mamba(B)]
    for draft, mtp in [((), True), ((), False), ((1,), True), ((1,), False)]:
        config = cache_config(specs, 10, draft)
        scheduler_config = SchedulerOffloadConfig.from_spec(
            offloading_spec(config, cpu_tier(1), B), serve_config(mtp), config
        )
        flags = [group.is_eagle_group for group in scheduler_config.kv_group_configs]
        assert flags == [i in draft for i in range(3)], (draft, mtp)


@pytest.mark.parametrize("mtp", [False, True])
def test_guard_a_partial_tail_is_not_offloaded_under_mtp(mtp):
    """It needs a hand-off that speculation lacks; unannotated groups must not switch it on."""
    config = cache_config([full_attention(B), mamba(B)], 10)
    scheduler_config = SchedulerOffloadConfig.from_spec(
        offloading_spec(config, cpu_tier(1), B // 4), serve_config(mtp), config
    )
    assert scheduler_config.supports_partial_tail is (not mtp)


def test_guard_without_speculation_nothing_changes():
    engine = hybrid(mtp=False)
    prompt = list(range(10 * B + 5))
    engine.run("first", prompt)
    evict_gpu(engine)
    assert engine.start("again", prompt) == (0, 10 * B)
    assert engine.loaded == [(0, i) for i in range(10)] + [(1, 9)]


# --- the lookup of a draft group is widened by the chunk that it drops -------------------------


def lookup(specs, draft_groups, in_tier, tokens):
    """Tokens served when the tier holds, for each group, the chunks in `in_tier`."""
    config = cache_config(specs, 10, draft_groups)
    tier = cpu_tier(200)
    hash_size = min(spec.block_size for spec in specs)
    connector = OffloadingConnectorScheduler(offloading_spec(config, tier, hash_size), serve_config(True), config)
    r = request("r", list(range(tokens)), hash_size)
    connector.on_new_request(r)
    state = connector._req_status["r"]
    state.update_offload_keys()
    for group, chunks in enumerate(in_tier):
        keys = [state.group_states[group].offload_keys[i] for i in chunks]
        if keys:
            tier.prepare_store(keys, state.req_context)
            tier.complete_store(set(keys), state.req_context)
    return connector.get_num_new_matched_tokens(r, 0)[0]


@pytest.mark.parametrize("draft", ["full attention", "sliding window"])
def test_a_draft_group_does_not_cut_into_the_hit_of_a_coarser_group(draft):
    """Draft chunks of 4 tokens beside one state of 16: dropping 4 would leave 12, no state."""
    draft_spec = full_attention(4) if draft == "full attention" else sliding_window(4, 8)
    served = lookup([draft_spec, mamba(16)], (0,), [range(7), [0]], tokens=29)
    assert served == 16


def test_guard_a_draft_group_that_a_later_group_shortens_drops_once():
    specs = [full_attention(4), sliding_window(4, 4)]
    assert lookup(specs, (0,), [range(7), [1]], tokens=29) == 8


def test_guard_the_drop_still_happens_where_no_more_is_known():
    """The chunk to drop is the last there is: nothing widens, one chunk is lost."""
    assert lookup([full_attention(4)], (0,), [range(5)], tokens=29) == 16
    assert lookup([full_attention(4)], (0,), [range(7)], tokens=28) == 24
    assert lookup([full_attention(4)], (0,), [[0]], tokens=29) == 0


# --- a load starts at the computed boundary ---------------------------------------------------


def load_into(other, other_hashed, local, external):
    """The load job for a table of full attention beside `other`; block ids 100+ and 200+."""
    config = cache_config([full_attention(B), other], 10)
    tier = cpu_tier(100)
    connector = OffloadingConnectorScheduler(offloading_spec(config, tier, B), serve_config(True), config)
    total = (local + external) // B
    r = request("r", list(range(total * B + 1)), B)
    connector.on_new_request(r)
    state = connector._req_status["r"]
    state.update_offload_keys()
    state.num_locally_computed_tokens = local
    for group_state in state.group_states:
        tier.prepare_store(group_state.offload_keys, state.req_context)
        tier.complete_store(set(group_state.offload_keys), state.req_context)

    def table(group, first_id, hashed):
        blocks = [KVCacheBlock(first_id + i) for i in range(total)]
        for i in hashed:
            blocks[i]._block_hash = make_block_hash_with_group_id(BlockHash(b"%d" % i), group)
        return blocks

    attention = table(0, 100, range(local // B))
    connector.update_state_after_alloc(r, KVCacheBlocks((attention, table(1, 200, other_hashed))), external)
    [job] = connector._current_batch_load_jobs.values()
    [status] = connector._jobs.values()
    return SimpleNamespace(
        blocks=job.dst_spec.block_ids.tolist(),
        sizes=list(job.dst_spec.group_sizes),
        first=list(job.dst_spec.block_indices),
        keys=status.keys,
        expected={make_offload_key(r.block_hashes[i], g) for g in (0, 1) for i in range(local // B, total)},
    )


@pytest.mark.parametrize("other", [mamba(B), sliding_window(B, 2 * B)], ids=["mamba", "sliding window"])
@pytest.mark.parametrize("hashed", [(), (0,), (1,)])
def test_an_unhashed_block_below_the_computed_boundary_is_no_destination(other, hashed):
    job = load_into(other, hashed, local=2 * B, external=B)
    assert job.blocks == [102, 202]
    assert (job.sizes, job.first) == ([1, 1], [2, 2])
    assert job.keys == job.expected


def test_guard_with_nothing_computed_the_load_starts_at_the_first_block():
    job = load_into(sliding_window(B, 2 * B), (), local=0, external=2 * B)
    assert job.blocks == [100, 101, 200, 201]
    assert job.keys == job.expected


# --- a finished request stores no block that ends at its last sampled token --------------------


@pytest.mark.parametrize("accepted", [0, 2])
@pytest.mark.parametrize("mtp", [False, True])
def test_the_last_sampled_token_completes_no_stored_block(mtp, accepted):
    engine = Engine([full_attention(B)], mtp, prompt_only=False)
    prompt, outputs = list(range(2 * B - 5)), list(range(500, 505))
    engine.start("r", prompt)
    engine.prefill()
    engine.decode(outputs, accepted if mtp else 0)
    assert engine.request.num_tokens == 2 * B
    engine.finish()
    assert stored_ends(engine, prompt + outputs) == [B]


def test_guard_a_block_that_ends_one_token_earlier_is_stored():
    engine = Engine([full_attention(B)], mtp=False, prompt_only=False)
    prompt, outputs = list(range(2 * B - 5)), list(range(500, 506))
    engine.start("r", prompt)
    engine.prefill()
    engine.decode(outputs)
    engine.finish()
    assert stored_ends(engine, prompt + outputs) == [B, 2 * B]


def test_no_decoded_block_is_held_back_when_nothing_is_a_draft_group():
    engine = Engine([full_attention(B)], mtp=True, prompt_only=False)
    prompt, outputs = list(range(2 * B - 5)), list(range(500, 506))
    engine.start("r", prompt)
    engine.prefill()
    engine.decode(outputs, accepted=2)
    engine.finish()
    assert stored_ends(engine, prompt + outputs) == [B, 2 * B]


def test_guard_the_prompt_is_stored_whole():
    """A block that ends at the last prompt token was computed, whatever was sampled after."""
    engine = Engine([full_attention(B)], mtp=True, prompt_only=False)
    prompt = list(range(2 * B))
    engine.run("r", prompt)
    assert stored_ends(engine, prompt) == [B, 2 * B]


def test_guard_an_aborted_request_stores_what_was_computed():
    engine = Engine([full_attention(B)], mtp=False, prompt_only=False)
    prompt = list(range(4 * B))
    engine.start("r", prompt)
    engine._schedule(0, prompt[: 2 * B])
    engine.finish(RequestStatus.FINISHED_ABORTED)
    assert stored_ends(engine, prompt) == [B, 2 * B]


def test_a_request_that_finishes_while_preempted_stores_no_freed_block():
    """Output still in flight at a preemption may finish the request: its blocks are gone."""
    engine = Engine([full_attention(B)], mtp=False, prompt_only=False)
    prompt, outputs = list(range(2 * B - 5)), list(range(500, 503))
    engine.start("r", prompt)
    engine.prefill()
    engine.decode(outputs)
    r = engine.request
    before = len(engine.stored)
    engine.kv.free(r)
    r.num_computed_tokens = 0
    for token in range(503, 506):
        r.append_output_token_ids(token)
    assert r.num_tokens > 2 * B
    engine.gpu.clear()  # someone else's now
    engine.finish()
    assert len(engine.stored) == before


def stored_ends(engine: Engine, tokens: list[int]) -> list[int]:
    """The ends of the stored attention blocks, each proved to hold what it is filed under."""
    ends = []
    for group, content in engine.stored:
        assert group == 0
        assert content, "a block that was never written was stored"
        start = min(content)
        assert start % B == 0
        assert content == {p: tokens[p] for p in range(start, start + B)}
        ends.append(start + B)
    return ends
