"""A server that decodes nothing: answers /completion with as many tokens as are wanted, all the same.

    python other_server.py --host H --port P [what llama-server takes]

It says that it took half of each prompt from its cache.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for _ in range(asked["n_predict"]):
            self.send({"content": "a", "tokens": [5], "stop": False})
        n_prompt = len(asked["prompt"])
        timings = {"cache_n": n_prompt // 2, "prompt_n": n_prompt - n_prompt // 2}
        timings["predicted_n"] = asked["n_predict"]
        self.send({"content": "", "tokens": [], "stop": True, "timings": timings})

    def send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


if __name__ == "__main__":
    host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
