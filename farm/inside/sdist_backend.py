"""A build backend that reads an sdist's own metadata and builds nothing.

Put on pip's path as `setuptools.build_meta`, the backend that vLLM names, it
lets `pip download --no-binary :all: --no-build-isolation` accept any vLLM
sdist: pip asks the backend for the metadata, and the sdist carries it already
(PKG-INFO).  No setup.py runs, so neither torch nor a compiler is needed.
Standard library only; the interpreter is the one whose pip is used.
"""

import email.parser
import pathlib


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """PEP 517: write NAME-VERSION.dist-info/METADATA and return the folder's name."""
    text = pathlib.Path("PKG-INFO").read_bytes()
    headers = email.parser.BytesHeaderParser().parsebytes(text)
    folder = pathlib.Path(metadata_directory, f"{headers['Name']}-{headers['Version']}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_bytes(text)
    return folder.name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    raise RuntimeError("this backend only reads metadata; nothing is built from vLLM's sdist here")
