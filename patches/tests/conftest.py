"""The tests here run inside a pin's tree: they import vllm, from wherever PYTHONPATH puts it."""

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    spec = importlib.util.find_spec("vllm")
    return f"tree: {spec.origin if spec else 'no vllm in this environment, nothing to test'}"
