"""A completions server as a process of its own: `word_server.py PORT [too_short]`. Standard library
only: it starts at once. Every token is a word; `too_short` answers with one word less than asked
for."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MISSING = int(sys.argv[2:] == ["too_short"])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "words"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["max_tokens"] - MISSING
        events = [{"choices": [{"text": "word ", "finish_reason": None}]} for _ in range(count)]
        usage = {"completion_tokens": count, "prompt_tokens": len(body["prompt"].split())}
        events += [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._answer("".join([*lines, "data: [DONE]\n\n"]).encode())

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """No log."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
