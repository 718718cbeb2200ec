"""Which package a word of --pin stands for."""

import pytest

from farm import sources
from farm.errors import UsageError
from farm.pins import PinStore


@pytest.mark.parametrize(("word", "version"), [("0.28", "0.28.0"), ("0.28.0", "0.28.0"), ("v0.30.0", "0.30.0"),
                                               ("0.30.0rc1", "0.30.0rc1"), ("0.12.0.post2", "0.12.0.post2")])
def test_a_release_is_written_as_vllm_writes_it(tmp_path, monkeypatch, word, version):
    monkeypatch.setattr(PinStore, "source", lambda self, version, pin, progress: tmp_path / version)
    found = sources.resolve(word, tmp_path, print)
    assert (found.label, found.version, found.package) == (word, version, tmp_path / version)


def test_neither_a_pin_nor_a_release(tmp_path):
    with pytest.raises(UsageError, match="--pin 0.29.0-cqu: neither a pin nor a version; did you mean '0.29.0-cpu'"):
        sources.resolve("0.29.0-cqu", tmp_path, print)
