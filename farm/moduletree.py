"""Which module of a vLLM tree has which name, without importing it.  A tree: a package directory, and what a series changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from farm.modules import PACKAGE, FactsCache, ModuleFacts, Reference

ENVS = f"{PACKAGE}.envs"
INIT = "__init__.py"
# What a build makes or brings along, so that a source tree and another flavour's wheel lack it (setup.py of 0.27 to 0.33).
_BUILT = re.compile(rf"{PACKAGE}\.(_version|vllm_flash_attn|third_party|cumem_allocator|spinloop|triton_kernels|fmha_sm100|"
                    r"tml_fa4|(.*\.)?(\w*_C(_\w+)?|\w+_pb2(_grpc)?))(\.|$)")

_STARS = 100  # modules that star imports are followed through


class Has(Enum):
    YES = "yes"
    SUBMODULE = "submodule"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fault:
    """A reference that does not resolve: `module` is not in the tree (`name` None), or lacks `name`."""

    module: str
    name: str | None
    is_import: bool
    too_high: bool = False  # a relative import that leaves the package

    @property
    def words(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


class ModuleTree:
    """A `vllm` package directory (read only) under an overlay: path relative to it -> bytes, None for a deleted file."""

    def __init__(self, package: Path, overlay: Mapping[str, bytes | None], facts: FactsCache) -> None:
        self.package, self.overlay, self._facts = package, overlay, facts
        self._seen: dict[str, ModuleFacts | None] = {}
        self._files: dict[str, bool] = {}
        self._modules: dict[str, bool] = {}
        self._laid = {parent.as_posix() for path, data in overlay.items() if data is not None
                      for parent in PurePosixPath(path).parents}

    def source(self, path: str) -> bytes | None:
        """Bytes of a file of the tree, None where there is none.  Raises OSError where the package cannot be read."""
        if path in self.overlay:
            return self.overlay[path]
        if not self._is_file(path):
            return None
        with open(os.path.join(self.package, path), "rb", buffering=0) as stream:
            return stream.read()

    def facts(self, path: str) -> ModuleFacts | None:
        if path not in self._seen:
            source = self.source(path)
            self._seen[path] = None if source is None else self._facts.facts(source)
        return self._seen[path]

    def python_files(self) -> Iterator[str]:
        """Paths of all modules of the tree, in order."""
        found = {path for path, data in self.overlay.items() if path.endswith(".py") and data is not None}
        for folder, _, names in os.walk(self.package):
            inner = os.path.relpath(folder, self.package)
            paths = (name if inner == "." else f"{inner}/{name}" for name in names if name.endswith(".py"))
            found.update(path for path in paths if path not in self.overlay)
        return iter(sorted(found))

    # --- modules --------------------------------------------------------------------------

    def path_of(self, module: str) -> str | None:
        """The file of a module, None where the tree has no such file."""
        inner = module[len(PACKAGE) + 1:].replace(".", "/")
        candidates = (f"{inner}/{INIT}", f"{inner}.py") if inner else (INIT,)  # Python's own order
        return next((path for path in candidates if self._is_file(path)), None)

    def has_module(self, module: str) -> bool:
        """Also true for what a build makes and for a directory without `__init__.py`."""
        if module not in self._modules:
            self._modules[module] = (bool(_BUILT.match(module)) or self.path_of(module) is not None
                                     or self._is_compiled(module) or self._is_bare(module))
        return self._modules[module]

    def _is_file(self, path: str) -> bool:
        if path in self.overlay:
            return self.overlay[path] is not None
        if path not in self._files:
            self._files[path] = os.path.isfile(os.path.join(self.package, path))
        return self._files[path]

    def _is_compiled(self, module: str) -> bool:
        place = self.package.joinpath(*module.split(".")[1:])
        return place != self.package and any(place.parent.glob(f"{place.name}*.so"))

    def _is_bare(self, module: str) -> bool:
        """A namespace package: a directory that holds a file still."""
        inner = "/".join(module.split(".")[1:])
        return inner in self._laid or any(file.relative_to(self.package).as_posix() not in self.overlay
                                          for file in (self.package / inner).rglob("*.py"))

    # --- names ----------------------------------------------------------------------------

    def look(self, module: str, name: str, *, typing: bool = False) -> Has:
        """Whether a module has a name, at run time or (`typing`) for type checkers."""
        return self._look(module, name, typing, set())

    def _look(self, module: str, name: str, typing: bool, visited: set[str]) -> Has:
        path = None if _BUILT.match(module) else self.path_of(module)
        facts = None if path is None else self.facts(path)
        visited.add(module)
        if path is None or facts is None or facts.error or (name.startswith("__") and name.endswith("__")):
            return Has.UNKNOWN
        if name in facts.names or (typing and name in facts.typing_names):
            return Has.YES
        if path.endswith(INIT) and self.has_module(f"{module}.{name}"):
            return Has.SUBMODULE
        registry = module == ENVS and facts.knobs is not None
        if registry and not facts.knobs_open:
            return Has.YES if name in facts.knobs else Has.NO  # its `__getattr__` serves these alone
        return Has.UNKNOWN if facts.opaque or registry else self._look_in_stars(path, facts, name, typing, visited)

    def _look_in_stars(self, path: str, facts: ModuleFacts, name: str, typing: bool, visited: set[str]) -> Has:
        found = Has.NO
        for level, written in facts.stars:
            star = absolute(path, level, written)
            if star is None or not is_ours(star) or not self.has_module(star):
                return Has.UNKNOWN
            if star in visited:
                continue
            if len(visited) > _STARS:
                return Has.UNKNOWN
            there = self.facts(self.path_of(star) or "")
            exported = there is None or (name in there.exports if there.exports is not None else not name.startswith("_"))
            answer = self._look(star, name, typing, visited) if exported else Has.NO
            if answer in (Has.YES, Has.SUBMODULE):
                return Has.YES
            if answer is Has.UNKNOWN:
                found = Has.UNKNOWN
        return found

    def star_imports_give(self, path: str, name: str) -> Has:
        """Whether a star import of this file may give a name."""
        facts = self.facts(path)
        return Has.UNKNOWN if facts is None else self._look_in_stars(path, facts, name, False, set())

    # --- references -----------------------------------------------------------------------

    def fault(self, path: str, reference: Reference) -> Fault | None:
        """What is wrong with a reference that the file `path` makes; None where nothing is, or nobody can tell."""
        module = absolute(path, reference.level, reference.module)
        is_import = not reference.attrs
        if module is None:
            return Fault("." * reference.level + reference.module, None, is_import, too_high=True) if is_import else None
        if not is_ours(module):
            return None
        if not self.has_module(module):
            return Fault(module, None, is_import) if is_import else None  # the import is reported, not its uses
        asked = () if reference.name in (None, "*") else (reference.name,)
        for at, name in enumerate((*asked, *reference.attrs)):
            has = self.look(module, name, typing=reference.typing)
            if has is Has.NO:
                return Fault(module, name, is_import) if is_import or at >= len(asked) else None
            if has is not Has.SUBMODULE:
                return None
            module = f"{module}.{name}"
        return None


def absolute(path: str, level: int, module: str) -> str | None:
    """The module that an import in the file `path` means; None: its dots lead out of the package."""
    if level == 0:
        return module
    packages = [PACKAGE, *path.split("/")[:-1]]
    if level > len(packages):
        return None
    return ".".join([*packages[:len(packages) - level + 1], *([module] if module else [])])


def is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")
