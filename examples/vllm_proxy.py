"""A small proxy before one P and one D that names sessions for snapd: ``python vllm_proxy.py --help``.

It shows what a router has to do, and is no router: one P, one D, no authentication, no retries. Each request
goes to P for one token, as in every prefill/decode split, and then to D, which answers. What P says in
``kv_transfer_params`` (of a connector that takes KV from P to D) is passed on; ``snapd`` is added for both:

* P is told the session, so that it finds what D pushed after the turn before;
* D is told the same session, so that it pushes this turn to the daemon of that P.

The session is the header ``X-Session-Id``, or a new one, which comes back in the same header.
"""

import argparse
import json
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions")
TIMEOUT_S = 600.0
# What a connector that takes KV from P to D wants to read at P; without one it is not looked at.
ASK_P = {"do_remote_decode": True, "do_remote_prefill": False}


def for_p(body: dict[str, Any], session_id: str) -> dict[str, Any]:
    """Return the request for P: the whole prompt and one token."""
    one_token = {"stream": False, "max_tokens": 1, "n": 1}
    if "max_completion_tokens" in body:
        one_token["max_completion_tokens"] = 1
    params = {**ASK_P, "snapd": {"session_id": session_id, "push": False}}
    kept = {key: value for key, value in body.items() if key != "stream_options"}
    return {**kept, **one_token, "kv_transfer_params": params}


def for_d(
    body: dict[str, Any], session_id: str, socket_path: str, said_by_p: dict[str, Any]
) -> dict[str, Any]:
    """Return the request for D: what P said, the session, and the daemon of that P."""
    snapd = {"session_id": session_id} | ({"socket_path": socket_path} if socket_path else {})
    passed_on = {key: value for key, value in said_by_p.items() if key != "snapd"}
    return {**body, "kv_transfer_params": {**passed_on, "snapd": snapd}}


class Proxy(BaseHTTPRequestHandler):
    """Handles one request; the server has the settings."""

    protocol_version = "HTTP/1.0"

    def do_POST(self) -> None:
        """Have P prefill and D answer."""
        if self.path not in PATHS:
            self.send_error(404, f"one of {', '.join(PATHS)} is wanted")
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session_id = self.headers.get("X-Session-Id") or uuid.uuid4().hex
        settings = self.server.settings  # type: ignore[attr-defined]
        try:
            with self._ask(settings.p, for_p(body, session_id)) as reply:
                said_by_p = json.load(reply).get("kv_transfer_params") or {}
            request = for_d(body, session_id, settings.socket_path, said_by_p)
            with self._ask(settings.d, request) as reply:
                self._pass_on(reply, session_id)
        except urllib.error.HTTPError as error:
            self._pass_on(error, session_id)

    def _ask(self, url: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the operator's own addresses
            url + self.path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310

    def _pass_on(self, reply: Any, session_id: str) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.headers.get("Content-Type", "application/json"))
        self.send_header("X-Session-Id", session_id)
        self.end_headers()
        # As it comes, so that streams stream.
        while part := reply.read1(65_536):
            self.wfile.write(part)
            self.wfile.flush()


def serve(settings: argparse.Namespace) -> ThreadingHTTPServer:
    """Return a server that listens."""
    server = ThreadingHTTPServer((settings.host, settings.port), Proxy)
    server.settings = settings  # type: ignore[attr-defined]
    return server


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--p", default="http://127.0.0.1:8100", help="P's address")
    parser.add_argument("--d", default="http://127.0.0.1:8200", help="D's address")
    parser.add_argument(
        "--socket-path",
        default="",
        help="the daemon beside P, as D reaches it; else the one that D is set to",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    serve(parser.parse_args()).serve_forever()


if __name__ == "__main__":
    main()
