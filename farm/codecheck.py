"""Is code that applies still right in its tree?  It must compile, and what it names must be there.  vLLM is never imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from farm.findings import Finding, Kind
from farm.modules import KNOBS, PACKAGE, FactsCache, ModuleFacts, Reference
from farm.moduletree import ENVS, INIT, Fault, Has, ModuleTree, absolute
from farm.undefined import EXPORTED, STARRED, TOO_EARLY, Undefined, undefined_names

Files = Mapping[str, bytes | None]

ENVS_FILE = "envs.py"
# Variables of the system, the launcher and the libraries below vLLM, which set or document them: not vLLM's to register.
# Single names, no families: a patch's own knob that merely begins like these is a knob of the patch.
SYSTEM_VARIABLES = frozenset({
    "HOME", "PATH", "PWD", "SHELL", "USER", "LANG", "LC_ALL", "TERM", "TMPDIR", "TEMP", "TMP", "HOSTNAME", "SYSTEMROOT",
    "WINDIR", "NO_COLOR",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "CONDA_PREFIX",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ROCM_HOME", "ROCM_PATH", "ZE_AFFINITY_MASK",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_INTERPRET",
    "HF_HOME", "HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
})
# Of libraries and launchers, named by their prefix: vLLM's registry is not the place for them.
SYSTEM_PREFIXES = ("NCCL_", "GLOO_", "SLURM_", "KUBERNETES_", "NVIDIA_", "CUDA_", "RAY_", "TORCH_", "PYTORCH_", "HF_", "OMP_",
                   "MKL_", "TOKENIZERS_", "TRITON_", "FLASHINFER_", "HIP_", "ROCM_", "UCX_", "NVSHMEM_", "PYTHON", "LD_")
MOST = 100  # faults of one sort that one file is told: it is broken enough by then


def code_findings(before: Files, after: Files, package: Path, overlay: Files, cache: Path) -> tuple[Finding, ...]:
    """Faults that one patch brings into a tree, by file and line; what was wrong before it is not among them.

    `before` and `after`: the files that the patch touches, path relative to the package -> bytes (None: not there).
    `overlay`: what the series changed, this patch included (None: deleted); any other file is read from `package`, a
    pristine `vllm` directory.  A knob that a later patch registers counts where `overlay` holds that patch's envs.py.
    A reference is one fault a file, on its first line, however often it stands there.
    A module or name that the patch takes away is looked for in the whole tree: its users are named with their own file.
    Raises UsageError without ruff, OSError where the package cannot be read; never for bad source.
    """
    facts = FactsCache(cache)
    paths = sorted({*before, *after})
    touched = tuple(path for path in paths if path.endswith(".py"))
    patch = _Patch(old=ModuleTree(package, {**overlay, **{path: before.get(path) for path in paths}}, facts),
                   new=ModuleTree(package, {**overlay, **{path: after.get(path) for path in paths}}, facts),
                   touched=touched,
                   removed=tuple(p for p in touched if before.get(p) is not None and after.get(p) is None))
    findings = [*_uncompiled(patch), *_undefined(patch, cache), *_unresolved(patch), *_unregistered(patch)]
    findings.sort(key=lambda f: (f.file, f.line, f.kind.value, f.name))
    return tuple({(f.kind, f.file, f.name): f for f in reversed(findings)}.values())[::-1]


def registered_knobs(tree: ModuleTree) -> frozenset[str] | None:
    """What the tree's vllm/envs.py registers; None where that cannot be told without running it."""
    facts = tree.facts(ENVS_FILE)
    return None if facts is None or facts.knobs is None or facts.knobs_open else facts.knobs


@dataclass(frozen=True)
class _Patch:
    """The trees before and after a patch, and the Python files that it touches."""

    old: ModuleTree
    new: ModuleTree
    touched: tuple[str, ...]
    removed: tuple[str, ...]

    def readable(self) -> Iterator[tuple[str, ModuleFacts]]:
        for path in self.touched:
            facts = self.new.facts(path)
            if facts is not None and facts.error is None:
                yield path, facts

    def ancestors(self, path: str) -> Sequence[str]:
        """Where a file's old noise stood: in itself, or for a new file in those that the patch removes (it may be renamed)."""
        if self.old.source(path) is not None:
            return (path,)
        return self.removed

    def old_facts(self, path: str) -> Iterator[tuple[str, ModuleFacts]]:
        for ancestor in self.ancestors(path):
            facts = self.old.facts(ancestor)
            if facts is not None and facts.error is None:
                yield ancestor, facts


# --- does it compile -------------------------------------------------------------------------


def _uncompiled(patch: _Patch) -> Iterator[Finding]:
    for path in patch.touched:
        facts = patch.new.facts(path)
        if facts is None or facts.error is None:
            continue
        was = [patch.old.facts(ancestor) for ancestor in patch.ancestors(path)]
        if not was or any(old is not None and old.error is None for old in was):
            line, words = facts.error
            yield Finding(Kind.DOES_NOT_COMPILE, path, line, "", f"Python refuses {path} as this patch leaves it: {words}")


# --- undefined names -------------------------------------------------------------------------


def _undefined(patch: _Patch, cache: Path) -> Iterator[Finding]:
    sources: dict[str, bytes] = {}
    new: dict[str, ModuleFacts] = {}
    olds: dict[str, list[tuple[ModuleFacts, bytes]]] = {}
    for path, new[path] in patch.readable():
        sources[path] = patch.new.source(path) or b""
        olds[path] = [(facts, patch.old.source(p) or b"") for p, facts in patch.old_facts(path)]
    answers = undefined_names([*sources.values(), *(s for old in olds.values() for _, s in old)], cache)
    for path, source in sources.items():
        names = answers[source]
        known = [answers[old] for _, old in olds[path]]
        if names is None:
            if not known or None not in known:
                yield Finding(Kind.UNDEFINED_NAME, path, 1, "", f"ruff cannot read {path} as this patch leaves it (nested too "
                              "deeply), so nobody knows whether its names are defined; write it plainer")
            continue
        noise = {n.name for old in known for n in old or ()}
        told = 0
        for each in _first(names):
            if each.name not in noise and told < MOST and not _given(patch, path, new[path], each):
                told += 1
                gone = any(each.name in facts.names for facts, _ in olds[path])
                yield Finding(Kind.UNDEFINED_NAME, path, each.line, each.name, _undefined_words(path, each, gone=gone))


def _undefined_words(path: str, each: Undefined, *, gone: bool) -> str:
    use = f"`{each.name}` is {'listed in `__all__`' if each.rule == EXPORTED else 'used here'}"
    if each.rule == TOO_EARLY:
        return f"{use} before it is assigned: to this function it is a name of its own"
    return f"{use}, and this patch took its definition away" if gone else f"{use}, and nothing in this tree's {path} defines it"


def _first(names: Iterable[Undefined]) -> Iterable[Undefined]:
    """Each name once, on its first line."""
    return {n.name: n for n in sorted(names, key=lambda n: -n.line)}.values()


def _given(patch: _Patch, path: str, facts: ModuleFacts, each: Undefined) -> bool:
    """It may come from where ruff does not look: a star import, `__getattr__`, a submodule, or a package's own `__path__`."""
    if each.name == "__path__" and path.endswith(INIT):
        return True
    if each.rule == STARRED:
        return patch.new.star_imports_give(path, each.name) is not Has.NO
    if each.rule != EXPORTED:
        return False
    return facts.opaque or (path.endswith(INIT) and patch.new.has_module(f"{absolute(path, 1, '')}.{each.name}"))


# --- imports and attributes ------------------------------------------------------------------


def _unresolved(patch: _Patch) -> Iterator[Finding]:
    lost = _lost(patch)
    for path, facts in patch.readable():
        before = {_key(ancestor, reference): (ancestor, reference)
                  for ancestor, old in patch.old_facts(path) for reference in old.references}
        told: set[tuple[bool, str]] = set()
        for reference in sorted(facts.references, key=lambda r: r.line):
            if len(told) >= MOST:
                break
            was = before.get(_key(path, reference))
            if was is not None and not lost:
                continue  # it stood there before, and nothing went away
            fault = patch.new.fault(path, reference)
            if fault is None or (was is not None and patch.old.fault(*was) is not None):
                continue
            if (fault.is_import, fault.words) not in told:
                told.add((fault.is_import, fault.words))
                yield _faulty(patch, path, reference, fault)
    if lost:
        yield from _stranded(patch, lost)


def _key(path: str, reference: Reference) -> tuple[str | None, str | None, tuple[str, ...], bool]:
    return absolute(path, reference.level, reference.module), reference.name, reference.attrs, reference.typing


def _faulty(patch: _Patch, path: str, reference: Reference, fault: Fault) -> Finding:
    if fault.name is None:
        detail = (f"`{fault.module}` leads out of the package {PACKAGE}" if fault.too_high else
                  f"there is no module {fault.module} in this tree")
        return Finding(Kind.UNRESOLVED_IMPORT, path, reference.line, fault.module, detail)
    if fault.module == ENVS and fault.name.isupper():
        return Finding(Kind.UNREGISTERED_KNOB, path, reference.line, fault.name,
                       f"vllm/{ENVS_FILE} does not register {fault.name}, so asking {ENVS} for it raises; add it to {KNOBS}")
    there = patch.new.facts(patch.new.path_of(fault.module) or "") or ModuleFacts()
    near = difflib.get_close_matches(fault.name, sorted(there.names | (there.knobs or frozenset())), 1)
    detail = f"{fault.module} has no `{fault.name}` in this tree{f'; the nearest that it has is `{near[0]}`' if near else ''}"
    return Finding(Kind.UNRESOLVED_IMPORT if fault.is_import else Kind.MISSING_ATTRIBUTE, path, reference.line,
                   fault.words, detail)


# --- what the patch takes away ---------------------------------------------------------------


def _lost(patch: _Patch) -> dict[str, frozenset[str] | None]:
    """Per touched file the top-level names that the patch takes from it (None: all, or nobody can tell)."""
    lost: dict[str, frozenset[str] | None] = {}
    for path in patch.touched:
        old, new = patch.old.facts(path), patch.new.facts(path)
        if old is None or old.error is not None:
            continue
        if new is None:
            lost[path] = None
        elif new.error is None:
            names = (old.names - new.names) | (old.typing_names - new.typing_names - new.names)
            names |= (old.knobs or frozenset()) - (new.knobs or frozenset())
            if new.exports is not None:  # what star imports of it get
                names |= (old.names if old.exports is None else old.exports) - new.exports
            if set(old.stars) - set(new.stars) or (old.opaque and not new.opaque):
                lost[path] = None
            elif names:
                lost[path] = frozenset(names)
    return lost


def _stranded(patch: _Patch, lost: Mapping[str, frozenset[str] | None]) -> Iterator[Finding]:
    """Users of what went away, in files that the patch does not touch: each thing once, with its first user."""
    wanted = [(_words(path)[:1 if names is None else 2], names) for path, names in lost.items()]
    reach = {word for words, names in wanted for word in names or words}
    needles = [([word.encode() for word in words], [name.encode() for name in names or ()]) for words, names in wanted]
    first: dict[str, Finding] = {}
    users: dict[str, set[str]] = {}
    for path in patch.new.python_files():
        source = b"" if path in patch.touched else patch.new.source(path) or b""
        if not any(any(word in source for word in words) and (not names or any(name in source for name in names))
                   for words, names in needles):
            continue  # most of a package: reading its bytes takes 40 ms, reading what they mean would take 20 s
        for reference in (patch.new.facts(path) or ModuleFacts()).references:
            if reach.isdisjoint((*reference.module.split("."), reference.name or "", *reference.attrs)):
                continue
            fault = patch.new.fault(path, reference)
            if fault is not None and patch.old.fault(path, reference) is None:
                users.setdefault(fault.words, set()).add(path)
                first.setdefault(fault.words, _faulty(patch, path, reference, fault))
    for words, finding in first.items():
        more = len(users[words]) - 1
        also = f", and {more} more file{'s' if more > 1 else ''} would miss it" if more else ""
        yield replace(finding, detail=f"this patch took it away: {finding.detail}{also}")


def _words(path: str) -> tuple[str, ...]:
    """Last parts of a module's name and of its package's, which may hand on its names: a user's source holds one of them."""
    parts = (absolute(path, 1, "") or PACKAGE).split(".")
    return (parts[-1],) if path.endswith(INIT) else (PurePosixPath(path).stem, parts[-1])


# --- knobs -----------------------------------------------------------------------------------


def _of_others(name: str) -> bool:
    """Whether the variable is the system's or a library's, which vLLM's registry need not know."""
    return name in SYSTEM_VARIABLES or name.startswith(SYSTEM_PREFIXES)


def _unregistered(patch: _Patch) -> Iterator[Finding]:
    for path, facts in patch.readable():
        old = {read.name for _, was in patch.old_facts(path) for read in was.reads}
        reads = {read.name: read for read in sorted(facts.reads, key=lambda r: -r.line)
                 if not _of_others(read.name) and (read.name not in old or ENVS_FILE in patch.touched)}
        registered = registered_knobs(patch.new) if reads else None
        if registered is None:
            continue
        noise = old - (registered_knobs(patch.old) or frozenset())
        unknown = [read for name, read in reads.items() if name not in registered and name not in noise]
        for read in sorted(unknown, key=lambda r: r.line)[:MOST]:
            yield Finding(Kind.UNREGISTERED_KNOB, path, read.line, read.name,
                          f"vllm/{ENVS_FILE} does not register {read.name}: a misspelt one passes unseen, and compile caches "
                          f"ignore it; add it to {KNOBS}")
