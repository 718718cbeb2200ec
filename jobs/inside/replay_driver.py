"""Runs inside a tree: drive the tree's own scheduler and KV-cache manager through one prefill.

No model, no card, no hub.  Scheduling, chunk splitting, block allocation and
retirement are the tree's code; what this file supplies is what the engine core
and the model would: the order of schedule and update (`step_with_batch_queue`
in vllm/v1/engine/core.py, with a queue of lag + 1 batches) and the replies (one
token at the end of the prefill, drafts all rejected).  Each prompt gets a fresh
scheduler and is followed through its prefill and its first decode step, whose
retirement is the first to see what the last chunk left behind.

stdin: {"scenarios": [{name, block_size, speculative_blocks, method, chunk_budget,
lag, mamba_groups, prompts}]}.  stdout, a JSON object a line:
{"event": "attest", "vllm_path", "version"} first; then for each prompt
{"event": "prompt", "scenario", "prompt_tokens", "chunks", "before", "after",
"peak_blocks", "pool_blocks"} where `chunks` are tokens a prefill step and `before`
and `after` are the state blocks that the request holds (non-null entries of the
fullest Mamba group's table) around each call of `remove_skipped_blocks`; or
{"event": "unknown-api", "detail"} where this vLLM has parts that the driver does
not know.  All else goes to stderr.  Known: 0.28.0 to 0.33.0.
"""

import importlib
import inspect
import json
import os
import sys
from collections import deque

REQUEST = "replay"
DECODE_STEPS = 1
SAMPLED_TOKEN = 7


class UnknownApi(AttributeError):
    """This vLLM is not built as the driver expects; says nothing about the tree's behaviour."""


class ModelFacts:
    """What the scheduler asks of a text-only decoder's ModelConfig; a ModelConfig proper needs a model's files."""

    def __init__(self, max_model_len):
        self.max_model_len = max_model_len
        self.skip_tokenizer_init = True
        self.multimodal_config = None
        self.runner_type = "generate"
        for name in ("is_encoder_decoder", "is_diffusion", "is_multimodal_model", "supports_multimodal_inputs",
                     "uses_mrope", "uses_xdrope", "enable_return_routed_experts", "return_sampling_mask"):
            setattr(self, name, False)

    def __getattr__(self, name):
        raise UnknownApi(f"the scheduler asks for model_config.{name}: add it to ModelFacts")


def build(factory, **given):
    """Call a vLLM factory by keyword after checking that its signature still takes these and asks for no more."""
    parameters = inspect.signature(factory).parameters
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if open_ended else sorted(set(given) - set(named))
    missing = [n for n in named if parameters[n].default is inspect.Parameter.empty and n not in given]
    if unknown or missing:
        raise UnknownApi(f"{factory.__module__}.{factory.__qualname__}: takes no {unknown or 'more'}, "
                         f"wants {missing or 'no more'}")
    return factory(**given)


class Api:
    """The vLLM names that the driver uses, looked up once."""

    NAMES = {
        "vllm.config": ("CacheConfig", "DeviceConfig", "SchedulerConfig", "SpeculativeConfig", "VllmConfig"),
        "vllm.sampling_params": ("SamplingParams",),
        "vllm.utils.hashing": ("sha256",),
        "vllm.v1.core.kv_cache_utils": ("get_request_block_hasher", "init_none_hash", "resolve_kv_cache_block_sizes"),
        "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
        "vllm.v1.core.sched.scheduler": ("Scheduler",),
        "vllm.v1.core.single_type_kv_cache_manager": ("register_all_kvcache_specs",),
        "vllm.v1.kv_cache_interface": ("FullAttentionSpec", "KVCacheConfig", "KVCacheGroupSpec", "MambaSpec"),
        "vllm.v1.outputs": ("DraftTokenIds", "ModelRunnerOutput"),
        "vllm.v1.request": ("Request",),
        "vllm.v1.structured_output": ("StructuredOutputManager",),
    }

    def __init__(self):
        for module, names in self.NAMES.items():
            try:
                loaded = importlib.import_module(module)
            except ImportError as error:
                raise UnknownApi(f"import {module}: {error}") from error
            for name in names:
                if not hasattr(loaded, name):
                    raise UnknownApi(f"{module} has no {name}")
                setattr(self, name, getattr(loaded, name))
        self.init_none_hash(self.sha256)


def vllm_config(api, case, max_model_len):
    """The tree's VllmConfig of a served hybrid model, less the model."""
    drafts = case["speculative_blocks"]
    speculative = None
    if drafts:
        # n-gram is the one method that needs no draft model's files; the methods differ here by name alone.
        speculative = build(api.SpeculativeConfig, model="ngram", num_speculative_tokens=drafts, prompt_lookup_min=1,
                            prompt_lookup_max=drafts)
        speculative.method = case["method"]
    config = build(
        api.VllmConfig,
        device_config=build(api.DeviceConfig, device="cpu"),  # no platform need be found
        speculative_config=speculative,
        scheduler_config=build(api.SchedulerConfig, max_num_seqs=4, max_num_batched_tokens=case["chunk_budget"],
                               max_model_len=max_model_len, enable_chunked_prefill=True, is_encoder_decoder=False),
        cache_config=build(api.CacheConfig, block_size=case["block_size"], enable_prefix_caching=True,
                           mamba_cache_mode="align"),
    )
    # Set after the checks of VllmConfig: the CPU flavour's platform turns async scheduling off.
    config.scheduler_config.async_scheduling = case["lag"] > 0
    config.model_config = ModelFacts(max_model_len)
    return config


def kv_config(api, case, max_model_len):
    """One full-attention group and the Mamba groups, in a pool that holds every block of a request at once."""
    import torch

    block = case["block_size"]
    attention = build(api.FullAttentionSpec, block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    state = build(api.MambaSpec, block_size=block, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align",
                  num_speculative_blocks=case["speculative_blocks"])
    specs = [attention] + [state] * case["mamba_groups"]
    per_group = -(-max_model_len // block) + case["speculative_blocks"] + 2
    groups = [build(api.KVCacheGroupSpec, layer_names=[f"layer.{i}"], kv_cache_spec=s) for i, s in enumerate(specs)]
    return build(api.KVCacheConfig, num_blocks=per_group * len(specs) + 1, kv_cache_tensors=[], kv_cache_groups=groups)


def scheduler_of(api, case, prompt_tokens):
    """The scheduler that the engine core would build for this configuration, and its block-hash size."""
    max_model_len = prompt_tokens + case["block_size"]
    config = vllm_config(api, case, max_model_len)
    kv = kv_config(api, case, max_model_len)
    config.cache_config.num_gpu_blocks = kv.num_blocks
    api.register_all_kvcache_specs(config)
    block_size, hash_block_size = api.resolve_kv_cache_block_sizes(kv, config)
    kind = api.AsyncScheduler if case["lag"] else api.Scheduler
    scheduler = build(kind, vllm_config=config, kv_cache_config=kv,
                      structured_output_manager=api.StructuredOutputManager(config), block_size=block_size,
                      hash_block_size=hash_block_size)
    if not getattr(scheduler, "need_mamba_block_aligned_split", True):
        raise UnknownApi("the scheduler does not split this configuration's chunks for align mode")
    return scheduler, hash_block_size


class Watch:
    """Counts around each retirement; wraps the coordinator's method on this one instance."""

    def __init__(self, api, scheduler):
        manager = scheduler.kv_cache_manager
        self.before, self.after, self.peak = [], [], 0
        self._manager, self._pool = manager, manager.block_pool
        self._free_at_start = self._pool.get_num_free_blocks()
        groups = manager.kv_cache_config.kv_cache_groups
        self._mamba = [i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, api.MambaSpec)]
        retire = manager.coordinator.remove_skipped_blocks

        def counted(*args, **kwargs):
            self.before.append(self.held())
            retire(*args, **kwargs)
            self.after.append(self.held())

        manager.coordinator.remove_skipped_blocks = counted

    def held(self):
        tables = self._manager.get_blocks(REQUEST).blocks
        return max(sum(not block.is_null for block in tables[i]) for i in self._mamba)

    def scheduled(self):
        self.peak = max(self.peak, self._free_at_start - self._pool.get_num_free_blocks())


def reply(api, output, request):
    """What the model runner returns for one step: a token once the whole prompt has been computed, drafts rejected."""
    ids = list(output.num_scheduled_tokens)
    computed = request.num_computed_tokens - request.num_in_flight_tokens
    tokens = [[SAMPLED_TOKEN] if computed + output.num_scheduled_tokens[i] >= request.num_prompt_tokens else []
              for i in ids]
    return build(api.ModelRunnerOutput, req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)},
                 sampled_token_ids=tokens)


def replay(api, case, prompt_tokens):
    """One prompt on a fresh scheduler: its row."""
    scheduler, hash_block_size = scheduler_of(api, case, prompt_tokens)
    hasher = api.get_request_block_hasher(hash_block_size, api.sha256)
    params = build(api.SamplingParams, max_tokens=1 + DECODE_STEPS, ignore_eos=True)
    request = build(api.Request, request_id=REQUEST, prompt_token_ids=list(range(prompt_tokens)),
                    sampling_params=params, pooling_params=None, block_hasher=hasher)
    watch = Watch(api, scheduler)
    scheduler.add_request(request)
    chunks, queue, idle = [], deque(), 0
    while scheduler.has_requests() or queue:
        if scheduler.has_requests():
            before = request.num_computed_tokens
            output = scheduler.schedule()
            watch.scheduled()
            tokens = output.num_scheduled_tokens.get(REQUEST, 0)
            if tokens and before < prompt_tokens:
                chunks.append(tokens)
            queue.append(output)
            idle = 0 if tokens else idle + 1
            if idle > case["lag"] + 2:
                raise RuntimeError(f"prompt of {prompt_tokens} tokens: the scheduler stopped at "
                                   f"{request.num_computed_tokens} computed tokens (chunks {chunks})")
            if len(queue) <= case["lag"] and scheduler.has_requests():
                continue
        output = queue.popleft()
        scheduler.update_from_output(output, reply(api, output, request))
        drafts = case["speculative_blocks"]
        if drafts and not case["lag"] and not request.is_finished():
            drafted = build(api.DraftTokenIds, req_ids=[REQUEST], draft_token_ids=[[SAMPLED_TOKEN] * drafts])
            scheduler.update_draft_token_ids(drafted)
    if sum(chunks) != prompt_tokens or request.num_preemptions:
        raise RuntimeError(f"prompt of {prompt_tokens} tokens: prefilled {sum(chunks)} in chunks {chunks} "
                           f"with {request.num_preemptions} preemptions")
    if not watch.before:
        raise UnknownApi("the KV-cache manager never called its coordinator's remove_skipped_blocks")
    return {"event": "prompt", "scenario": case["name"], "prompt_tokens": prompt_tokens, "chunks": chunks,
            "before": watch.before, "after": watch.after, "peak_blocks": watch.peak,
            "pool_blocks": scheduler.kv_cache_config.num_blocks}


def main():
    # vLLM and its libraries log to stdout, some of them from C: give them stderr and keep the pipe for rows.
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Which runner there would be depends on Triton and the card; retirement does not depend on it.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    args = json.load(sys.stdin)

    import vllm

    print(json.dumps({"event": "attest", "vllm_path": vllm.__file__, "version": vllm.__version__}), file=rows)
    try:
        api = Api()
        for case in args["scenarios"]:
            for prompt_tokens in case["prompts"]:
                print(json.dumps(replay(api, case, prompt_tokens)), file=rows)
    except UnknownApi as error:
        print(json.dumps({"event": "unknown-api", "detail": f"vLLM {vllm.__version__}: {error}"}), file=rows)


if __name__ == "__main__":
    main()
