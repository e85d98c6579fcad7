"""The ``kv_events_*`` settings: addresses, and what must fit together."""

import pytest

from snapd.config import load_config
from snapd.errors import ConfigError
from snapd.kveventsconfig import endpoint, event_address
from snapd.units import MIB

ON = {"kv_events_address": "tcp://127.0.0.1:5557"}


def refused(**overrides: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:5557", ("127.0.0.1", 5557)),
        ("tcp://:5557", ("127.0.0.1", 5557)),
        ("tcp://localhost:0", ("127.0.0.1", 0)),
        ("tcp://0.0.0.0:5557", ("0.0.0.0", 5557)),
        ("tcp://[::1]:5557", ("::1", 5557)),
    ],
)
def test_an_address_is_a_host_and_a_port_and_loopback_without_a_host(text, address):
    assert event_address(text) == address
    assert load_config(None, {}, {"kv_events_address": text}).kv_events_address == text


def test_zeromq_is_given_the_address_in_its_own_form():
    assert endpoint("127.0.0.1", 5557) == "tcp://127.0.0.1:5557"
    assert endpoint("::1", 0) == "tcp://[::1]:0"


@pytest.mark.parametrize("name", ["kv_events_address", "kv_events_replay_address"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("127.0.0.1:5557", "does not begin with tcp://"),
        ("ipc:///tmp/x", "does not begin with tcp://"),
        ("tcp://*:5557", "to be open to other hosts write"),
        ("tcp://host.example:5557", "no IP address"),
        ("tcp://127.0.0.1", "no port"),
        ("tcp://127.0.0.1:65536", "no port"),
    ],
)
def test_another_address_is_refused_with_what_to_write(name, text, why):
    said = refused(**(ON | {name: text}))
    assert name in said and text in said and why in said and "tcp://127.0.0.1:5557" in said


@pytest.mark.parametrize("name", ["kv_events_replay_address", "kv_events_connect_address"])
def test_without_the_first_address_the_others_are_refused(name):
    said = refused(**{name: "tcp://127.0.0.1:5558"})
    assert name in said and "kv_events_address is empty" in said


@pytest.mark.parametrize("text", ["tcp://router.example:5557", "tcp://10.0.0.9:1", "tcp://[fd00::1]:65535"])
def test_what_is_connected_to_may_be_a_name(text):
    config = load_config(None, {}, ON | {"kv_events_connect_address": text})
    assert config.kv_events_connect_address == text


@pytest.mark.parametrize(
    "text", ["router.example:5557", "tcp://router.example", "tcp://a b:5557", "tcp://*:5557", "tcp://a:0",
             "tcp://a:65536", "tcp://fd00::1:5557"],
)  # fmt: skip
def test_what_can_not_be_connected_to_is_refused_with_what_to_write(text):
    said = refused(**ON, kv_events_connect_address=text)
    assert text in said and "tcp://10.0.0.9:5557" in said


def test_a_medium_that_routers_take_for_ps_gpu_is_refused():
    assert "CPU_PINNED" in refused(**ON, kv_events_medium="GPU")


def test_a_topic_is_bounded_in_bytes():
    load_config(None, {}, ON | {"kv_events_topic": "k" * 255})
    assert "256 bytes" in refused(**ON, kv_events_topic="é" * 128)


def test_token_ids_must_fit_a_frame_with_everything_else_but_only_where_events_are_published():
    room = 4 * MIB - 16_384 * (34 + 8) - 512 - 16 * 1024
    load_config(None, {}, ON | {"kv_events_token_ids_max": room // 4})
    said = refused(**ON, kv_events_token_ids_max=room // 4 + 1)
    assert "kv_events_token_ids_max" in said and "frame_bytes_max" in said
    load_config(None, {}, {"kv_events_token_ids_max": room})


def test_sizes_may_be_written_with_a_unit():
    config = load_config(None, {}, ON | {"kv_events_queue_bytes_max": "1MiB"})
    assert config.kv_events_queue_bytes_max == MIB
