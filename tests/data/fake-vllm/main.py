"""Plays `vllm serve` on a Unix socket or a port; installed as vllm/entrypoints/cli/main.py of a made-up tree.

FAKE says how it behaves.  Standard library only.
"""

import ctypes
import http.server
import importlib.util
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

MODE = os.environ.get("FAKE", "healthy")
PACKAGE = Path(__file__).resolve().parents[2]
REFUSAL = Path(__file__).with_name("refusal.log")


def say(text, level="INFO"):
    print(f"(EngineCore pid={os.getpid()}) {level} 01-02 03:04:05 [fake.py:1] {text}", flush=True)


def option(name, default=None):
    """The word after the last `name`, or behind its `=`."""
    words = [word for given in sys.argv for word in given.split("=", 1)]
    return words[len(words) - words[::-1].index(name)] if name in words else default


NAME = option("--served-model-name", "played")

# In a session of its own, as vLLM's engine may be; the server gets a request's tokens from it, and waits where none come.
# With a size, it keeps a tier in /dev/shm under a name of its own, as vLLM up to 0.28 does.
ENGINE = """
import ctypes, mmap, os, signal, sys, time, uuid
ctypes.CDLL(sys.argv[1])
size = int(float(sys.argv[2]) * 2**30)
if size:
    handle = os.open(f"/dev/shm/vllm_offload_{uuid.uuid4()}.mmap", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(handle, size)
    tier = mmap.mmap(handle, size)
    tier[:] = bytes(size)
print("up", flush=True)
for line in sys.stdin:
    if "slow" in line:
        sys.stderr.write("(EngineCore pid=1) INFO 01-02 03:04:05 [fake.py:1] prefill begins\\n")
        sys.stderr.flush()
        time.sleep(99)
    print("token", flush=True)
"""


class Engine:
    """Like an API server that does not notice its engine's end: it goes on waiting."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", ENGINE, str(PACKAGE / "_C.abi3.so"),
                                         option("--kv-offloading-size", "0")], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout.readline() == "up\n"
        self.lock = threading.Lock()  # one request at a time has the pipe
        say(f"engine {self.process.pid} is up")

    def ask(self, canary):
        if MODE == "engine-dies-in-canary" and canary:
            self.process.kill()
        try:
            with self.lock:
                print("quick" if canary or MODE != "engine-prefills" else "slow", file=self.process.stdin, flush=True)
                if self.process.stdout.readline() == "token\n":
                    return
        except OSError:
            pass
        time.sleep(99)


engine = None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body:  # the client may be gone once it has read an empty answer's headers
            self.wfile.write(body)

    def do_GET(self):
        if MODE == "mute" and self.server.canary_done:
            time.sleep(99)
        if MODE == "never-healthy":
            self.answer(503, b"")
        elif self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/metrics":
            self.answer(200, b'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:prompt_tokens_total{engine="0"} 3\n')
        elif self.path == "/v1/models" and MODE != "no-models":
            self.answer(200, json.dumps({"data": [{"id": NAME, "root": sys.argv[2]}]}).encode())
        else:
            self.answer(404, b"")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["model"] == NAME
        tokens = len(request["prompt"])
        canary = tokens == 16
        if MODE == "canary-fails" and canary:
            self.answer(500, b'{"error": {"message": "the kernel is not there"}}')
            return
        if MODE == "canary-hangs" and canary:
            time.sleep(99)
        if MODE == "dies-in-canary":
            say("Traceback (most recent call last):", "ERROR")
            say("RuntimeError: engine gone", "ERROR")
            os._exit(5)
        if MODE == "mute" and not canary:
            time.sleep(99)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        if engine is not None:
            self.wfile.flush()
            engine.ask(canary)
        self.event({"choices": [{"text": "a", "finish_reason": None}]})
        if MODE == "dies-in-request" and not canary:
            say("torch.OutOfMemoryError is what it would have said", "ERROR")
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "request-hangs" and not canary:
            time.sleep(99)
        self.event({"choices": [{"text": "b", "finish_reason": "length"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": request["max_tokens"],
                                             "prompt_tokens_details": {"cached_tokens": 0}}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        self.server.canary_done = True
        if MODE == "dies-after-last-token" and not canary:
            self.wfile.flush()
            self.connection.shutdown(2)
            os.kill(os.getpid(), signal.SIGKILL)

    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    canary_done = False

    def get_request(self):
        connection, _ = super().get_request()
        return connection, ("unix", 0)


class TcpServer(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    canary_done = False


def main():
    global engine
    torch = importlib.util.find_spec("torch")
    if torch is not None:
        ctypes.CDLL(os.path.join(torch.submodule_search_locations[0], "lib", "libtorch_cpu.so"))
    if MODE != "wrong-tree":
        ctypes.CDLL(str(PACKAGE / "_C.abi3.so"))
    if MODE == "foreign":
        ctypes.CDLL(os.environ["FAKE_FOREIGN"])
    say("Unknown vLLM environment variable detected: VLLM_MADE_UP", "WARNING")
    if MODE == "dies":
        say("Traceback (most recent call last):", "ERROR")
        say("ImportError: cannot import name 'x'", "ERROR")
        sys.exit(1)
    if MODE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "refuses":
        print(REFUSAL.read_text(encoding="utf-8"), flush=True)
        sys.exit(1)
    if MODE == "stalls":
        say("Loading model from scratch...")
        time.sleep(99)
    while MODE == "chatters":
        say("still loading")
        time.sleep(0.05)
    if MODE == "deaf-engine":
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    if MODE.startswith("engine"):
        engine = Engine()
    say("skipped memory profiling")
    say("Setting attention block size to 640 tokens to ensure that attention page size is >= mamba page size.")
    say("GPU KV cache size: 72,247 tokens, Maximum concurrency for 49,152 tokens per request: 1.47x")
    if MODE == "never-listens":
        time.sleep(99)
    say("Starting vLLM server")
    if option("--uds"):
        Server(option("--uds"), Handler).serve_forever()
    TcpServer((option("--host", "0.0.0.0"), int(option("--port", "8000"))), Handler).serve_forever()


main()
