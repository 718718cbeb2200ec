"""The environment of a process that runs in a tree: an allow-list, never our own whole.

A server, a test process and a script of the same tree and card get the same one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from farm.bench import Card

_INHERITED = (
    "PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME",
    "CUDA_HOME", "CUDA_PATH", "CC", "CXX", "TRITON_LIBCUDA_PATH", "TRITON_PTXAS_PATH",
)
CACHES = {
    "HOME": "home", "XDG_CACHE_HOME": "xdg", "XDG_CONFIG_HOME": "config", "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "config/vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "HF_HOME": "hf", "CUDA_CACHE_PATH": "cuda", "NUMBA_CACHE_DIR": "numba", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
# What a start script may not set anew: another card, or compiled code of another tree.
TIES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE",
)
_SECRET = re.compile(r"TOKEN(?!S|IZ)|SECRET|PASSW|API_?KEY|ACCESS_KEY|CREDENTIAL", re.I)


def child_environment(extra: Mapping[str, str], *, tree: Path, site: Path | None, caches: Path, card: Card,
                      commands: Path | None = None, carried: Path | None = None,
                      base: Mapping[str, str] | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """The whole environment of a process in a tree, and the same for the record.

    Of `base` (this process's own unless given) only an allow-list passes: no RAY_ variable and no
    credential of ours.  `extra` (profile, arm, marks) wins over the defaults, but not over what
    ties the process to its tree, its caches and its card.  `commands` is a folder that comes first on
    PATH, `carried` one that comes last on PYTHONPATH.  The second mapping is redacted: secret-looking variables say `set`.
    """
    base = os.environ if base is None else base
    environment = {name: base[name] for name in _INHERITED if name in base}
    environment |= {
        "PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    }
    if card.kind == "cpu" and card.cores:
        environment |= {"OMP_NUM_THREADS": str(len(card.cores)),
                        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, card.cores))}
    environment |= {name: value for name, value in extra.items() if not name.startswith("RAY_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join(str(p) for p in (tree, site, carried) if p is not None),
        "CUDA_VISIBLE_DEVICES": card.uuid if card.kind == "cuda" else "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **{name: str(caches / folder) for name, folder in CACHES.items()},
    }
    if commands is not None:
        environment["PATH"] = os.pathsep.join([str(commands), environment.get("PATH") or os.defpath])
    return environment, redact(environment)


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    """Secret-looking variables with `set` (or `unset`, if empty) in place of their value."""
    return {name: value if not _SECRET.search(name) else "set" if value else "unset"
            for name, value in environment.items()}


def redact_argv(argv: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for word in argv:
        flag, _, value = word.partition("=")
        if kept and kept[-1].startswith("--") and "=" not in kept[-1] and _SECRET.search(kept[-1].replace("-", "_")):
            kept.append("set")
        elif value and flag.startswith("--") and _SECRET.search(flag.replace("-", "_")):
            kept.append(f"{flag}=set")
        else:
            kept.append(word)
    return tuple(kept)
