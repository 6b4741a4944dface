# SPDX-License-Identifier: Apache-2.0
"""A program that stands in for vLLM's server in tests of what starts and stops it.

    fake_server.py MODE FIFO MODEL --host=... --port=PORT ...

It writes its arguments to the FIFO, and keeps it open together with a child of its own until both are
gone. Modes: `serve`, `stubborn` (which ignores a polite end), `unhealthy`, `refuse` and `crash`.
"""

import http.server
import json
import os
import signal
import subprocess
import sys


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()


def main(mode: str, fifo: str, *arguments: str) -> None:
    held = os.open(fifo, os.O_WRONLY)
    os.write(held, json.dumps(arguments).encode())
    waits = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    subprocess.Popen([sys.executable, "-c", waits], pass_fds=(held,))
    print("loading the model", flush=True)
    if mode == "refuse":
        print("ValueError: no such model", flush=True)
        sys.exit(3)
    if mode == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "unhealthy":
        Health.status = 503
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = next(one for one in arguments if one.startswith("--port=")).removeprefix("--port=")
    http.server.HTTPServer(("127.0.0.1", int(port)), Health).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
