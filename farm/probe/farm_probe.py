"""The probe: says which vLLM a process has loaded and, when asked, what its engine holds of the KV pool at every step.

vLLM loads it into every process of a server (entry point group `vllm.general_plugins`); farm.probing puts this one
file, which needs the standard library alone, on the server's PYTHONPATH.  It is never the end of a server: what goes
wrong in here becomes a line of its file, and the engine goes on unwatched.  A step costs 12 to 30 us, one of a prefill of
60,000 tokens 45 us; 3 us of these are the write, so that nothing need be kept back in a buffer.

FARM_ATTEST_OUT=FILE: each process appends one JSON line when it loads, or is forked from one that had; an engine, one more
once its cards are in use (`cards`: their UUIDs as CUDA tells them; null where the process itself uses none):
    {"event": "attest", pid, ppid, process, main, package, version, files, files_sha256}
    {"event": "cards", pid, cards}
FARM_PROBE_OUT=FILE: each engine appends a line when its scheduler is made, and one for each update that follows a step:
    {"event": "engine", "engine", pid, version, scheduler, pool_blocks, mamba_groups}
    {"engine", "n": lines before this one, "steps": [[t, used, tokens, [[request, before, after], ...]], ...],
     "t", "used", "running", "waiting", "retired": [[request, before, after], ...]}
or {"event": "unknown-api" or "failed", detail} where there is nothing to watch.  Neither variable: nothing is done.

`used` are blocks of the pool that are not free, less the null block: what `vllm:kv_cache_usage_perc` is computed from.
In `steps` they are counted when `schedule` has allocated, beside `t` where `update_from_output` has freed: that is the
gauge's own moment.  `before` and `after` are the state blocks that a request holds (non-null entries of its fullest
Mamba group's table) around each `remove_skipped_blocks`, null where there is no Mamba group.  `t` is CLOCK_MONOTONIC in
seconds.  A line is one write of O_APPEND, made before the engine hands the step's outputs on: whoever has a reply finds
its whole request in the file.

Known: 0.28.0 to 0.33.0.
"""

import functools
import glob
import hashlib
import json
import multiprocessing
import operator
import os
import sys
import time

ATTEST_OUT, PROBE_OUT = "FARM_ATTEST_OUT", "FARM_PROBE_OUT"
HASHED = "v1/core"  # scheduling and KV-cache management: hashed in every tree, besides what its patches touch

# What reading the objects of another release, or writing to a full disk, may raise; everything else is not ours.  vLLM's
# own calls stand outside of each guard, so that no exception of theirs is kept from the server.
FAULTS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
          ValueError)

KEPT = 64  # tables remembered beyond those of the running requests

_is_null = operator.attrgetter("is_null")
_encoded = json.JSONEncoder(separators=(",", ":")).encode


class UnknownApi(AttributeError):
    """This vLLM lacks a part that the probe reads."""


def load():
    """The plugin's entry point."""
    if path := os.environ.get(ATTEST_OUT):
        attest(path)
        when_chosen(path, tell_cards)
    if path := os.environ.get(PROBE_OUT):
        when_chosen(path, watch)


# --- which package this process runs -------------------------------------------------------------


def attest(path):
    try:
        said = attestation()
    except FAULTS as error:
        said = {"event": "failed", "detail": explained(error)}
    testify(path, said)
    # A forked process runs what this one has loaded, vLLM's mark that its plugins are loaded included: it never comes here.
    os.register_at_fork(after_in_child=functools.partial(testify, path, said))


def testify(path, said):
    try:
        append(path, {**said, "pid": os.getpid(), "ppid": os.getppid()})
    except FAULTS as error:
        print(f"farm_probe: no attestation in {path}: {explained(error)}", file=sys.stderr)


def attestation():
    import vllm

    package = os.path.dirname(os.path.abspath(vllm.__file__))
    files, digest = files_sha256(package)
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return {"event": "attest", "process": multiprocessing.current_process().name,
            "main": spec.name if spec else getattr(main, "__file__", None), "package": package, "version": vllm.__version__,
            "files": files, "files_sha256": digest}


def files_sha256(package):
    """How many of a package's files were hashed, and the hash over their paths and contents (3 ms for 0.29.0).

    Those are the Python files below HASHED and what the tree's patches touched, as the tree says of itself in its
    `vllm-*.dist-info/tree.json`; a touched file that is not there counts as such.
    """
    paths = {os.path.relpath(os.path.join(folder, name), package)
             for folder, _, names in os.walk(os.path.join(package, HASHED)) for name in names if name.endswith(".py")}
    for facts in glob.glob(os.path.join(glob.escape(os.path.dirname(package)), "vllm-*.dist-info", "tree.json")):
        with open(facts, encoding="utf-8") as file:
            paths.update(json.load(file)["touched"])
    total = hashlib.sha256()
    for path in sorted(paths):
        try:
            with open(os.path.join(package, path), "rb") as file:
                content = hashlib.sha256(file.read()).hexdigest()
        except FileNotFoundError:
            content = "absent"
        total.update(f"{path}\0{content}\n".encode())
    return len(paths), total.hexdigest()


# --- when an engine makes its scheduler -------------------------------------------------------------


def when_chosen(path, do):
    """Have `do(path, class)` called whenever an engine of this process chooses its scheduler's class, from now on.

    The engine core asks the configuration for it, and nobody else does: whatever class that is, only in the process that
    runs it, and when its model is on its card.  Importing the scheduler here would cost each process 1.5 s.
    """
    try:
        from vllm.config import SchedulerConfig

        choose = need(SchedulerConfig, "get_scheduler_cls")
        if do not in getattr(choose, "farm_probe", ()):
            SchedulerConfig.get_scheduler_cls = choosing(choose, path, do)
    except FAULTS as error:
        tell(path, "unknown-api", error)


def choosing(choose, path, do):
    @functools.wraps(choose)
    def chosen(self, *args, **kwargs):
        kind = choose(self, *args, **kwargs)
        try:
            do(path, kind)
        except FAULTS as error:
            tell(path, "unknown-api", error)
        return kind

    chosen.farm_probe = (*getattr(choose, "farm_probe", ()), do)
    return chosen


def tell_cards(path, kind):
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    cards = None
    if cuda is not None and cuda.is_initialized():  # to ask a process that uses no card would put it on one
        cards = [str(cuda.get_device_properties(i).uuid) for i in range(cuda.device_count())]
    append(path, {"event": "cards", "pid": os.getpid(), "cards": cards})


# --- what the engine holds ------------------------------------------------------------------------


def watch(path, kind):
    if not hasattr(kind.__init__, "farm_probe"):
        kind.__init__ = watching(kind.__init__, path)


def watching(make, path):
    @functools.wraps(make)
    def watched(self, *args, **kwargs):
        make(self, *args, **kwargs)
        try:
            if not hasattr(self, "farm_probe"):  # a class and its base may both be watched
                self.farm_probe = Watch(self, path)
                self.farm_probe.begin()
        except FAULTS as error:
            tell(path, "failed" if isinstance(error, OSError) else "unknown-api", error)

    watched.farm_probe = True
    return watched


class Watch:
    """Wraps three methods of one scheduler and its KV-cache coordinator; raises UnknownApi where it lacks what is read."""

    def __init__(self, scheduler, path):
        from vllm.v1.kv_cache_interface import MambaSpec

        self._path = path
        self._scheduler, self._coordinator = scheduler, need(scheduler, "kv_cache_manager.coordinator")
        self._pool = need(scheduler, "kv_cache_manager.block_pool")
        self._pool_blocks = need(self._pool, "num_gpu_blocks") - 1  # the null block is never used
        need(self._pool, "get_num_free_blocks")
        need(scheduler, "get_request_counts")
        groups = need(scheduler, "kv_cache_config.kv_cache_groups")
        managers = need(self._coordinator, "single_type_managers")
        self._mamba = [managers[i] for i, g in enumerate(groups) if isinstance(need(g, "kv_cache_spec"), MambaSpec)]
        for manager in self._mamba:
            need(manager, "req_to_blocks")
        self._schedule = need(scheduler, "schedule")
        self._update = need(scheduler, "update_from_output")
        self._retire = need(self._coordinator, "remove_skipped_blocks")
        self._wraps = ((scheduler, "schedule", self.schedule), (scheduler, "update_from_output", self.update_from_output),
                       (self._coordinator, "remove_skipped_blocks", self.remove_skipped_blocks))
        self._steps, self._retired, self._lines, self._state = [], [], 0, None
        self._counted = {}  # request: of each Mamba group, its table when last counted and the non-null entries
        self._engine = f"{os.getpid()}.{time.monotonic_ns()}"
        self._watches = True

    def begin(self):
        import vllm

        self._file = opened(self._path)
        kind = type(self._scheduler)
        write(self._file, {"event": "engine", "engine": self._engine, "pid": os.getpid(), "version": vllm.__version__,
                           "scheduler": f"{kind.__module__}.{kind.__qualname__}", "pool_blocks": self._pool_blocks,
                           "mamba_groups": len(self._mamba)})
        for owner, name, wrap in self._wraps:
            setattr(owner, name, wrap)

    def schedule(self, *args, **kwargs):
        output = self._schedule(*args, **kwargs)
        self._guarded(self._scheduled, output)
        return output

    def update_from_output(self, *args, **kwargs):
        outputs = self._update(*args, **kwargs)
        self._guarded(self._updated)
        return outputs

    def remove_skipped_blocks(self, *args, **kwargs):
        before = self._guarded(self._held, args, kwargs)
        result = self._retire(*args, **kwargs)
        self._guarded(self._removed, args, kwargs, before)
        return result

    def _held(self, args, kwargs):
        request = args[0] if args else kwargs["request_id"]
        counted = self._counted.setdefault(request, [([], 0)] * len(self._mamba))
        for i, manager in enumerate(self._mamba):
            table = manager.req_to_blocks.get(request) or []
            if table != counted[i][0]:  # 0.2 us where it is as it was, in place of 7 us for 60k tokens counted anew
                counted[i] = (list(table), len(table) - sum(map(_is_null, table)))
        return max((held for _, held in counted), default=None)

    def _removed(self, args, kwargs, before):
        request = args[0] if args else kwargs["request_id"]
        name = hashlib.sha256(request.encode()).hexdigest()[:12]
        self._retired.append((name, before, self._held(args, kwargs)))

    def _scheduled(self, output):
        tokens, used = output.total_num_scheduled_tokens, self._used()
        # An engine that waits for a transfer steps a thousand times a second, with nothing to tell.
        if tokens or self._retired or self._state is None or used != self._state[0]:
            self._steps.append((round(time.monotonic(), 6), used, tokens, self._retired))
            self._retired = []

    def _updated(self):
        running, waiting = self._scheduler.get_request_counts()
        state = (self._used(), running, waiting)
        if self._steps or self._retired or state != self._state:
            write(self._file, {"engine": self._engine, "n": self._lines, "steps": self._steps,
                               "t": round(time.monotonic(), 6), "used": state[0], "running": running, "waiting": waiting,
                               "retired": self._retired})
            self._steps, self._retired, self._state = [], [], state
            self._lines += 1
        if len(self._counted) > running + KEPT:
            self._counted.clear()

    def _used(self):
        return self._pool_blocks - self._pool.get_num_free_blocks()

    def _guarded(self, part, *args):
        if not self._watches:
            return None
        try:
            return part(*args)
        except FAULTS as error:
            self._watches = False
            for owner, name, wrap in self._wraps:
                if vars(owner).get(name) is wrap:  # else somebody has wrapped it again, and we only pass calls on
                    delattr(owner, name)  # the class's own method shows again
            tell(self._path, "failed", error)
            return None


def need(owner, names):
    """The part of `owner` that the dotted `names` lead to.  Raises UnknownApi."""
    for name in names.split("."):
        if not hasattr(owner, name):
            kind = owner if isinstance(owner, type) else type(owner)
            raise UnknownApi(f"{kind.__module__}.{kind.__qualname__} has no {name}")
        owner = getattr(owner, name)
    return owner


# --- lines -----------------------------------------------------------------------------------------


def tell(path, event, error):
    """An event about the probe itself; where its file cannot be written to, in the server's log."""
    try:
        append(path, {"event": event, "pid": os.getpid(), "version": getattr(sys.modules.get("vllm"), "__version__", None),
                      "detail": explained(error)})
    except FAULTS as failure:
        print(f"farm_probe: {event}: {explained(error)}; and {path}: {explained(failure)}", file=sys.stderr)


def explained(error):
    return f"{type(error).__name__}: {error}"


def append(path, line):
    file = opened(path)
    try:
        write(file, line)
    finally:
        os.close(file)


def opened(path):
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def write(file, line):
    data = f"{_encoded(line)}\n".encode()
    if os.write(file, data) != len(data):
        raise OSError("the disk took a part of a line only")
