# SPDX-License-Identifier: Apache-2.0
"""A program that stands in for vLLM's server in tests of the soak: it answers, or goes wrong.

    fake_chat_server.py MODE MODEL --port=PORT ...

An answer depends on its request alone in the mode `steady`. In company, `dies` dies after a while; in
`faulty` every request costs memory, and after a while answers take something of others, some requests
meet an error, the health check fails, and a child is there that ignores a polite end.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time

from harness.kinds.soak.child.requests import bad_requests

MAX_MODEL_LEN = 64
_PIECES = 3
_PIECE_S = 0.004
_SPOILED_AFTER = 15  # requests in company
_LEAK_BYTES = 2**21
_IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


class State:
    """What all connections share."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.lock = threading.Lock()
        self.open = self.in_company = 0
        self.leaked: list[bytes] = []
        self.bad = [
            (one.path, one.body, one.status) for one in bad_requests("metis", MAX_MODEL_LEN)
        ]

    @property
    def spoiled(self) -> bool:
        return self.in_company > _SPOILED_AFTER


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/health":
            sick = self.state.mode == "faulty" and self.state.spoiled
            self.send(503 if sick else 200, b"")
        else:
            count = self.state.in_company
            self.send(200, _metrics(count, self.state.open).encode(), "text/plain")

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["content-length"])).decode()
        try:
            body = json.loads(text)
        except ValueError:
            body = text
        for path, bad, status in self.state.bad:
            if (path, bad) == (self.path, body):
                self.send(status, b'{"error": {"message": "no"}}')
                return
        with self.state.lock:
            self.state.open += 1
            company = self.state.open > 1
            self.state.in_company += company
        try:
            self.answer(body, company)
        finally:
            with self.state.lock:
                self.state.open -= 1

    def answer(self, body: dict, company: bool) -> None:
        mode, spoiled = self.state.mode, self.state.spoiled and company
        if spoiled and mode == "faulty" and self.state.in_company % 7 == 0:
            self.send(500, b'{"error": {"message": "a step failed"}}')
            return
        if spoiled and mode == "dies":
            os._exit(3)
        if company and mode == "faulty":
            self.state.leaked.append(os.urandom(_LEAK_BYTES))
        asked = json.dumps([body.get("messages"), body.get("prompt")])
        word = hashlib.sha256(asked.encode()).hexdigest()[:8]
        if spoiled and mode == "faulty":
            word = "another"
        chat = self.path.endswith("chat/completions")
        if body.get("stream"):
            self.stream([f"{word} "] * _PIECES, chat)
            return
        time.sleep(_PIECES * _PIECE_S)
        message = {"role": "assistant", "content": f"{word} " * _PIECES}
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": message} if chat else {"text": message["content"]}
        self.send(200, json.dumps(_completion([choice], chat)).encode())

    def stream(self, pieces: list[str], chat: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for number, piece in enumerate(pieces, start=1):
            time.sleep(_PIECE_S)
            choice = {"index": 0, "finish_reason": "stop" if number == len(pieces) else None}
            choice |= {"delta": {"content": piece}} if chat else {"text": piece}
            chunk = _completion([choice], chat, "chat.completion.chunk")
            self.wfile.write(f"data: {json.dumps(chunk | {'usage': None})}\n\n".encode())
        last = json.dumps(_completion([], chat, "chat.completion.chunk"))
        self.wfile.write(f"data: {last}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True

    def send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client left: that is what it is for."""


def _completion(choices: list, chat: bool, kind: str = "chat.completion") -> dict:
    usage = {"prompt_tokens": 5, "completion_tokens": _PIECES, "total_tokens": 5 + _PIECES}
    return {
        "id": "one",
        "object": kind if chat else "text_completion",
        "created": 0,
        "model": "metis",
        "choices": choices,
        "usage": usage,
    }


def _metrics(finished: int, running: int) -> str:
    counters = {
        "vllm:num_preemptions": finished // 10,
        "vllm:prefix_cache_queries": 10 * finished,
        "vllm:prefix_cache_hits": 5 * finished,
        "vllm:prompt_tokens": 5 * finished,
        "vllm:generation_tokens": 3 * finished,
        "vllm:request_success": finished,
    }
    gauges = {
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0.5,
    }
    lines = []
    for kind, values, ending in (("counter", counters, "_total"), ("gauge", gauges, "")):
        for name, value in values.items():
            lines += [f"# TYPE {name}{ending} {kind}", f'{name}{ending}{{engine="0"}} {value}']
    return "\n".join(lines) + "\n"


def main(mode: str, *arguments: str) -> None:
    if mode == "faulty":
        subprocess.Popen([sys.executable, "-c", _IGNORES])
    Handler.state = State(mode)
    port = next(one for one in arguments if one.startswith("--port=")).removeprefix("--port=")
    Server(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
