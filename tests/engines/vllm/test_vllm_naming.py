"""What a request may say of itself, and which namespace its KV belongs to."""

from typing import Any

import pytest

from snapd.engines.vllm.naming import Asked, default_session_id, namespace_of, read_asked
from snapd.layout import Namespace

BASE = Namespace(model="m", weight_version="7", tenant="t")


def test_a_request_names_its_session_and_daemon() -> None:
    asked, problem = read_asked({"snapd": {"session_id": "chat", "socket_path": "/x.sock", "load": False}})
    assert (asked, problem) == (Asked(session_id="chat", socket_path="/x.sock", load=False), "")


def test_an_answer_may_come_back_as_the_next_request() -> None:
    answer = {"session_id": "chat", "tokens": 288, "slab_handle": 7, "reason": "x"}
    assert read_asked({"snapd": answer}) == (Asked(session_id="chat"), "")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_a_request_may_name_nothing(params: Any) -> None:
    assert read_asked(params) == (Asked(), "")


@pytest.mark.parametrize(
    "given",
    [
        "chat",
        {"session_id": 7},
        {"push": "no"},
        {"session_id": "x" * 513},
        {"session_id": "\ud800"},
        {"socket_path": "\ud800"},
    ],
)
def test_what_cannot_be_used_is_told_and_left_out(given: Any) -> None:
    asked, problem = read_asked({"snapd": given})
    assert asked == Asked() and problem


def test_two_requests_without_a_name_are_two_sessions() -> None:
    assert default_session_id("cmpl-1") != default_session_id("cmpl-2")
    assert default_session_id("é" * 1_000 + "1") != default_session_id("é" * 1_000 + "2")
    assert len(default_session_id("é" * 1_000).encode()) <= 512


def test_each_part_of_a_namespace_makes_another() -> None:
    def of(lora: str = "", salt: str = "", resets: int = 0) -> Namespace:
        return namespace_of(BASE, lora=lora, cache_salt=salt, resets=resets)

    assert of() == BASE
    assert (
        len({of(), of(lora="a"), of(lora="b"), of(salt="a"), of(salt="b"), of(resets=1), of(resets=2)}) == 7
    )
    assert of(lora="x" * 300) != of(lora="x" * 301) and len(of(lora="x" * 300).lora) <= 256


def test_a_salt_may_be_any_text() -> None:
    """Also one that is no Unicode, as JSON can hold it."""
    salts = ("", "\ud800", "\ud801")
    assert len({namespace_of(BASE, lora="", cache_salt=salt, resets=0) for salt in salts}) == 3


def test_a_salt_is_not_told() -> None:
    assert "secret" not in namespace_of(BASE, lora="", cache_salt="secret", resets=0).cache_salt
