"""The example's proxy, before two servers that write down what they are asked."""

import argparse
import importlib.util
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).parents[3] / "examples" / "vllm_proxy.py"
_SPEC = importlib.util.spec_from_file_location("vllm_proxy", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
proxy = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(proxy)


class Backend(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))  # type: ignore[attr-defined]
        answer, status = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Type", "text/x-answer")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


def started(server: Any) -> Any:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def backend(answer: bytes, status: int = 200) -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    server.asked = []  # type: ignore[attr-defined]
    server.answer = (answer, status)  # type: ignore[attr-defined]
    return started(server)


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def p_and_d() -> Iterator[tuple[Any, Any, Any]]:
    p = backend(b'{"kv_transfer_params": {"remote_engine_id": "e", "snapd": {"reason": "not-wanted"}}}')
    d = backend(b"data: 1\n\ndata: [DONE]\n\n")
    settings = argparse.Namespace(p=url(p), d=url(d), host="127.0.0.1", port=0, socket_path="/x.sock")
    front = started(proxy.serve(settings))
    yield p, d, front
    for server in (p, d, front):
        server.shutdown()
        server.server_close()


def post(server: Any, path: str, body: dict[str, Any], **headers: str) -> Any:
    return urllib.request.urlopen(
        urllib.request.Request(url(server) + path, json.dumps(body).encode(), headers), timeout=30
    )


def test_both_are_told_the_session_and_d_what_p_said(p_and_d: tuple[Any, Any, Any]) -> None:
    p, d, front = p_and_d
    body = {"prompt": "hello", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    with post(front, "/v1/completions", body, **{"X-Session-Id": "chat"}) as reply:
        assert reply.read() == d.answer[0]
        assert (reply.headers["X-Session-Id"], reply.headers["Content-Type"]) == ("chat", "text/x-answer")
    ((path, at_p),) = p.asked
    assert path == "/v1/completions" and at_p["max_tokens"] == 1 and at_p["stream"] is False
    assert "stream_options" not in at_p
    assert at_p["kv_transfer_params"]["snapd"] == {"session_id": "chat", "push": False}
    ((_, at_d),) = d.asked
    assert at_d["max_tokens"] == 9 and at_d["stream"] is True
    assert at_d["kv_transfer_params"] == {
        "remote_engine_id": "e",
        "snapd": {"session_id": "chat", "socket_path": "/x.sock"},
    }


def test_a_request_without_a_session_gets_one(p_and_d: tuple[Any, Any, Any]) -> None:
    _, d, front = p_and_d
    names = []
    for _ in range(2):
        with post(front, "/v1/chat/completions", {"messages": [], "max_completion_tokens": 5}) as reply:
            names.append(reply.headers["X-Session-Id"])
    told = [body["kv_transfer_params"]["snapd"]["session_id"] for _, body in d.asked]
    assert told == names and len(set(names)) == 2


def test_an_error_of_an_engine_comes_through(p_and_d: tuple[Any, Any, Any]) -> None:
    p, d, front = p_and_d
    p.answer = (b"no such model", 404)
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(front, "/v1/completions", {})
    assert caught.value.code == 404 and caught.value.read() == b"no such model"
    assert not d.asked
