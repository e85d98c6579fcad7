"""Settings: where they come from, what is refused, and what the refusal says."""

import json
import os
from pathlib import Path

import jsonschema
import msgspec
import pytest

from snapd import config as config_module
from snapd.config import (
    DAY_MS,
    SOCKET_PATH_BYTES_MAX,
    ArenaConfig,
    Config,
    config_schema,
    default_log_path,
    default_socket_path,
    environment_name,
    load,
    load_config,
)
from snapd.errors import ConfigError
from snapd.limits import Limits
from snapd.mooncakeconfig import MooncakeConfig
from snapd.units import GIB, KIB, MIB


@pytest.fixture(autouse=True)
def no_system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads this machine's /etc/kv-snapd/snapd.toml."""
    path = tmp_path / "etc" / "snapd.toml"
    monkeypatch.setattr(config_module, "DEFAULT_CONFIG_PATH", path)
    return path


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "given.toml"
        path.write_text(text)
        return path

    return write


def refused(path=None, env=None, overrides=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, env or {}, overrides or {})
    return str(caught.value)


# --- defaults and sources ---------------------------------------------------------------------


DEFAULTS = {
    "allowed_uids": (),
    "arenas": (ArenaConfig(rank=0, device="cpu", size_bytes=8 * GIB),),
    "alignment_bytes": 256,
    "register_piece_bytes": 0,
    "hugepages": "auto",
    "prefault": True,
    "transport": "shm",
    "mooncake": MooncakeConfig(),
    "reserve_timeout_ms": 10_000,
    "transfer_timeout_ms": 30_000,
    "transfer_min_mb_per_s": 100,
    "ready_ttl_ms": 300_000,
    "lease_ms": 10_000,
    "quarantine_ms": 60_000,
    "eviction_policy": "lru",
    "sessions_max": 100_000,
    "ended_history_max": 10_000,
    "session_history_max": 100_000,
    "layouts_max": 256,
    "page_keys_max": 16_384,
    "page_keys_total_max": 500_000,
    "session_id_bytes_max": 512,
    "num_tokens_max": 16_777_216,
    "connections_max": 1_024,
    "watchers_max": 64,
    "watch_queue_max": 4_096,
    "frame_bytes_max": 4 * MIB,
    "frame_timeout_ms": 10_000,
    "reply_buffer_bytes_max": 8 * MIB,
    "requests_in_flight_max": 1_024,
    "drain_timeout_ms": 5_000,
    "log_rotate_bytes": 256 * MIB,
    "log_rotate_keep": 8,
    "log_queue_bytes_max": 32 * MIB,
    "log_queue_lines_max": 65_536,
    "metrics_address": "",
    "kv_events_address": "",
    "kv_events_replay_address": "",
    "kv_events_connect_address": "",
    "kv_events_topic": "",
    "kv_events_medium": "CPU_PINNED",
    "kv_events_data_parallel_rank": 0,
    "kv_events_clear_all": True,
    "kv_events_token_ids_max": 262_144,
    "kv_events_pages_max": 500_000,
    "kv_events_queue_bytes_max": 64 * MIB,
    "kv_events_buffer_batches": 10_000,
    "kv_events_buffer_bytes_max": 64 * MIB,
    "access": (),
    "tcp_address": "",
    "tcp_connections_max": 1_024,
    "tls_certificate_path": "",
    "tls_key_path": "",
    "tls_client_ca_path": "",
    "tls_handshake_timeout_ms": 5_000,
    "tls_handshakes_max": 64,
    "tls_handshakes_per_s": 20,
    "limits": Limits(),
}


def test_the_defaults_are_the_documented_ones_and_fit_together():
    loaded = load(None, {}, {})
    values = msgspec.structs.asdict(loaded.config)
    assert {key: values[key] for key in DEFAULTS} == DEFAULTS
    assert set(values) == {*DEFAULTS, "socket_path", "log_path"}
    assert loaded.path is None
    tables = {
        f"{table}.{key}"
        for table in ("limits", "mooncake")
        for key in msgspec.structs.asdict(values.pop(table))
    }
    assert dict(loaded.origin) == dict.fromkeys({*values, *tables}, "default")


def test_a_config_made_without_loading_has_the_same_defaults(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RUNTIME_DIRECTORY": "/run/x", "LOGS_DIRECTORY": "/var/log/x"})
    made = Config()
    made.check()
    assert made == load_config(None, os.environ, {})
    assert made.socket_path == "/run/x/snapd.sock"


def test_flags_win_over_environment_over_file_over_defaults(toml):
    path = toml("lease_ms = 1\nquarantine_ms = 1\nready_ttl_ms = 100")
    env = {"SNAPD_LEASE_MS": "2", "SNAPD_QUARANTINE_MS": "2"}
    config, origin, read = load(path, env, {"lease_ms": 3})
    assert (config.lease_ms, config.quarantine_ms, config.ready_ttl_ms) == (3, 2, 100)
    assert origin["lease_ms"] == "command line"
    assert origin["quarantine_ms"] == "environment SNAPD_QUARANTINE_MS"
    assert origin["ready_ttl_ms"] == str(path) == str(read)
    assert origin["reserve_timeout_ms"] == "default"


def test_a_flag_that_was_not_given_changes_nothing():
    assert load_config(None, {"SNAPD_LEASE_MS": "7"}, {"lease_ms": None}).lease_ms == 7


def test_the_file_is_the_given_one_else_the_environments_else_the_systems(toml, tmp_path, no_system_file):
    no_system_file.parent.mkdir()
    no_system_file.write_text("lease_ms = 1")
    named = tmp_path / "named.toml"
    named.write_text("lease_ms = 2")
    env = {"SNAPD_CONFIG": str(named)}
    assert load(None, {}, {}).path == no_system_file
    assert load_config(None, {}, {}).lease_ms == 1
    assert load_config(None, env, {}).lease_ms == 2
    assert load_config(toml("lease_ms = 3"), env, {}).lease_ms == 3


def test_a_system_directory_that_may_not_be_searched_is_an_error_not_an_absent_file(monkeypatch):
    class Closed(type(Path())):
        def exists(self, **_):
            raise PermissionError(13, "Permission denied")

        def open(self, *_):
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(config_module, "DEFAULT_CONFIG_PATH", Closed("/etc/kv-snapd/snapd.toml"))
    assert refused() == "/etc/kv-snapd/snapd.toml: the configuration cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("env", "uid", "socket_path", "log_path"),
    [
        (
            {"RUNTIME_DIRECTORY": "/run/a:/run/b", "STATE_DIRECTORY": "/var/lib/a:/var/lib/b"},
            0, "/run/a/snapd.sock", "/var/lib/a/d-to-p-sync.jsonl",
        ),
        (
            {"LOGS_DIRECTORY": "/var/log/a", "STATE_DIRECTORY": "/var/lib/a", "XDG_RUNTIME_DIR": "/x"},
            0, "/run/kv-snapd/snapd.sock", "/var/log/a/d-to-p-sync.jsonl",
        ),
        ({"HOME": "/root"}, 0, "/run/kv-snapd/snapd.sock", "/var/log/kv-snapd/d-to-p-sync.jsonl"),
        (
            {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": "/s", "HOME": "/h"},
            7, "/run/user/7/kv-snapd/snapd.sock", "/s/kv-snapd/d-to-p-sync.jsonl",
        ),
        ({"HOME": "/h"}, 7, "/tmp/kv-snapd-7/snapd.sock", "/h/.local/state/kv-snapd/d-to-p-sync.jsonl"),
        ({}, 7, "/tmp/kv-snapd-7/snapd.sock", "/tmp/kv-snapd-7/d-to-p-sync.jsonl"),
    ],
)  # fmt: skip
def test_default_paths_follow_systemd_then_root_then_the_user(env, uid, socket_path, log_path, monkeypatch):
    assert default_socket_path(env, uid) == socket_path
    assert default_log_path(env, uid) == log_path
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    config = load_config(None, env, {})
    assert (config.socket_path, config.log_path) == (socket_path, log_path)


def test_a_path_under_home_is_expanded(toml):
    path = toml('log_path = "~/log.jsonl"\nsocket_path = "/run/~/s"')
    config = load_config(path, {"HOME": "/home/u"}, {})
    assert (config.log_path, config.socket_path) == ("/home/u/log.jsonl", "/run/~/s")
    assert load_config(path, {}, {}).log_path == "~/log.jsonl"


# --- forms of values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("lease_ms", "5000", 5000),
        ("lease_ms", " 5_000 ", 5000),
        ("frame_bytes_max", "2MiB", 2 * MIB),
        ("frame_bytes_max", "1_048_576", MIB),
        ("log_rotate_bytes", "0", 0),
        ("session_id_bytes_max", "1KiB", KIB),
        ("prefault", "no", False),
        ("prefault", "TRUE", True),
        ("hugepages", "on", "on"),
        ("transport", "shm", "shm"),
        ("allowed_uids", "1000, 1001,", (1000, 1001)),
        ("allowed_uids", "[1000]", (1000,)),
        ("allowed_uids", "", ()),
        ("socket_path", "/run/1", "/run/1"),
    ],
)
def test_variables_and_flags_are_text_of_any_type(key, text, value):
    assert getattr(load_config(None, {environment_name(key): text}, {}), key) == value
    assert getattr(load_config(None, {}, {key: text}), key) == value


def test_the_file_takes_sizes_as_text_or_bytes_and_everything_else_typed(toml):
    path = toml(
        'frame_bytes_max = "1MiB"\nlog_rotate_bytes = 1_000_000\nprefault = false\nallowed_uids = [5]\n'
        'register_piece_bytes = "4GiB"'
    )
    config = load_config(path, {}, {})
    assert (config.frame_bytes_max, config.log_rotate_bytes) == (MIB, 1_000_000)
    assert (config.prefault, config.allowed_uids, config.register_piece_bytes) == (False, (5,), 4 * GIB)


def test_flags_may_be_typed_already():
    arenas = (ArenaConfig(rank=4, device="cuda:1", size_bytes=GIB),)
    config = load_config(None, {}, {"arena": arenas, "allowed_uids": (1,), "prefault": False, "lease_ms": 9})
    assert (config.arenas, config.allowed_uids, config.prefault, config.lease_ms) == (arenas, (1,), False, 9)


# --- arenas -----------------------------------------------------------------------------------


def test_arenas_are_listed_one_by_one(toml):
    path = toml(
        '[[arena]]\ndevice = "cuda:0"\nsize_bytes = "1GiB"\n[[arena]]\nrank = 3\nsize_bytes = 1048576'
    )
    config, origin, _ = load(path, {}, {})
    assert config.arenas == (ArenaConfig(0, "cuda:0", GIB), ArenaConfig(3, "cpu", MIB))
    assert origin["arenas"] == str(path)


def test_the_shorthand_makes_equal_arenas_from_any_sources(toml):
    path = toml('ranks = 2\nsize = "1GiB"\ndevice = "cuda:0"')
    config, origin, _ = load(path, {"SNAPD_SIZE": "2GiB"}, {"ranks": "3"})
    assert config.arenas == tuple(ArenaConfig(rank, "cuda:0", 2 * GIB) for rank in range(3))
    assert origin["arenas"] == f"command line, environment SNAPD_SIZE, {path}"


def test_size_and_device_from_above_set_every_listed_arena(toml):
    path = toml('[[arena]]\n[[arena]]\nrank = 1\ndevice = "cuda:1"')
    config, origin, _ = load(path, {"SNAPD_SIZE": "1MiB"}, {"device": "cpu"})
    assert config.arenas == (ArenaConfig(0, "cpu", MIB), ArenaConfig(1, "cpu", MIB))
    assert origin["arenas"] == f"{path}, environment SNAPD_SIZE, command line"


def test_a_list_from_above_replaces_a_shorthand_below(toml):
    arenas = (ArenaConfig(rank=1),)
    config, origin, _ = load(toml('ranks = 9\nsize = "1GiB"'), {}, {"arena": arenas})
    assert (config.arenas, origin["arenas"]) == (arenas, "command line")


@pytest.mark.parametrize("short", ["ranks = 2", 'size = "1GiB"', 'device = "cpu"'])
def test_a_list_and_the_shorthand_in_one_file_are_refused(toml, short):
    message = refused(toml(f"{short}\n[[arena]]\nrank = 1"))
    assert short.split()[0] in message
    assert "cannot stand beside the [[arena]] tables" in message


def test_a_number_of_ranks_over_a_list_is_refused(toml):
    path = toml("[[arena]]\nrank = 1")
    assert "environment SNAPD_RANKS: ranks = 2 cannot stand beside" in refused(path, {"SNAPD_RANKS": "2"})


def test_two_arenas_of_one_rank_are_refused_with_a_free_rank(toml):
    message = refused(toml("[[arena]]\nrank = 4\n[[arena]]\nrank = 4"))
    assert "rank 4 has more than one arena" in message
    assert "rank = 5" in message


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:", "cuda:-1", "cuda:01", "cuda:1000", "CPU", "cpu ", "cuda:0\n", "gpu"]
)
def test_other_devices_are_refused(device):
    message = refused(env={"SNAPD_DEVICE": device})
    assert message.startswith("environment: SNAPD_DEVICE = ")
    assert 'write "cpu" or "cuda:0"' in message


def test_the_smallest_arena_is_one_mebibyte(toml):
    assert load_config(None, {"SNAPD_SIZE": "1MiB"}, {}).arenas[0].size_bytes == MIB
    assert "write a size from 1 MiB to 16 TiB" in refused(env={"SNAPD_SIZE": str(MIB - 1)})
    assert "arena[0].size_bytes = 1024 is wrong" in refused(toml('[[arena]]\nsize_bytes = "1KiB"'))


# --- what is refused --------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_the_nearest_known_name(toml):
    path = toml("lease_msec = 5")
    assert refused(path) == f"{path}: 'lease_msec' is no setting; did you mean 'lease_ms'?"
    assert "did you mean 'ready_ttl_ms'?" in refused(toml("Ready-TTL-ms = 5"))
    assert refused(env={"SNAPD_LEASE": "5"}).endswith("did you mean 'SNAPD_LEASE_MS'?")
    assert refused(overrides={"rank": 5}) == "command line: 'rank' is no setting; did you mean 'ranks'?"
    path = toml('[[arena]]\ndevcie = "cpu"')
    assert refused(path) == f"{path}: arena[0]: 'devcie' is no setting; did you mean 'device'?"


def test_a_name_near_to_none_is_refused_with_all_that_are_known(toml):
    message = refused(toml("qqqqqqqqqq = 5"))
    assert "did you mean" not in message
    assert all(key in message for key in ("lease_ms", "ranks", "arena"))


def test_only_variables_with_the_prefix_are_settings_and_the_files_path_is_none():
    assert load_config(None, {"LEASE_MS": "x", "PATH": "/bin", "XSNAPD_X": "1"}, {}).lease_ms == 10_000
    assert "SNAPD_ARENA" in refused(env={"SNAPD_ARENA": "1"})
    assert "no setting" in refused(env={"SNAPD_ARENA": "1"})


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("lease_ms = true", "lease_ms = true is wrong"),
        ("lease_ms = 0", "write a whole number from 1 to 86400000"),
        ("lease_ms = 1.5", "write a whole number"),
        ('lease_ms = "5000"', "write a whole number"),
        (f"ready_ttl_ms = {DAY_MS + 1}", "write a whole number from 1 to 86400000"),
        ('frame_bytes_max = "8QiB"', "write a size from 64 KiB to 1 GiB"),
        ('frame_bytes_max = ""', "write a size"),
        ("frame_bytes_max = 1979-05-27", "write a size"),
        ('session_id_bytes_max = "1MiB"', 'write a size from 1 B to 64 KiB, such as "64KiB"'),
        (f'log_rotate_bytes = "{"9" * 400}.5GiB"', "write a size"),
        ("sessions_max = 0", "write a whole number from 1 to"),
        ("prefault = 1", "write true or false"),
        ('prefault = "yes"', "write true or false"),
        ("hugepages = true", 'write "auto" or "off" or "on"'),
        ('transport = "rdma"', 'write "mooncake" or "shm"'),
        ("allowed_uids = 1000", "write a list"),
        ("allowed_uids = [-1]", "write a list"),
        ("allowed_uids = [4294967295]", "write a whole number from 0 to 4294967294"),
        ('socket_path = ""', "write a path"),
        ('log_path = ""', "write a path"),
        ("log_path = 5", "write a path"),
        ("arena = 1", "write 1 to 256 [[arena]] tables"),
        ("arena = [1]", "write 1 to 256 [[arena]] tables"),
        ("arena = []", "write 1 to 256 [[arena]] tables"),
        ("ranks = 257", "write a whole number from 1 to 256"),
        ("[lease_ms]\nx = 1", "write a whole number"),
    ],
)
def test_a_wrong_value_is_refused_with_file_key_and_what_to_write(toml, line, wanted):
    path = toml(line)
    message = refused(path)
    key = line.lstrip("[").split()[0].rstrip("]")
    assert message.startswith(f"{path}: {key} = ")
    assert wanted in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SNAPD_LEASE_MS", "5 s"),
        ("SNAPD_LEASE_MS", ""),
        ("SNAPD_LEASE_MS", "9" * 5000),
        ("SNAPD_PREFAULT", "maybe"),
        ("SNAPD_ALLOWED_UIDS", "1,root"),
        ("SNAPD_SIZE", "8Gi"),
        ("SNAPD_FRAME_BYTES_MAX", "-1"),
        ("SNAPD_HUGEPAGES", "\udcff"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variable, text):
    assert refused(env={variable: text}).startswith(f"environment: {variable} = ")


def test_a_flag_with_an_object_that_is_no_value_is_refused():
    assert refused(overrides={"arena": object()}).startswith("command line: arena = ")
    assert "arena[0].device = 'gpu' is wrong" in refused(overrides={"arena": (ArenaConfig(device="gpu"),)})
    assert refused(overrides={"lease_ms": 2**70}).startswith("command line: lease_ms = ")


@pytest.mark.parametrize("raw", [b"lease_ms = ", b"\xff\xfe", b"a = " + b"[" * 100_000, b"a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path, raw):
    path = tmp_path / "broken.toml"
    path.write_bytes(raw)
    assert refused(path).startswith(f"{path}: not valid TOML: ")


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    absent = tmp_path / "absent.toml"
    assert refused(absent) == f"{absent}: the configuration cannot be read: No such file or directory"
    assert refused(env={"SNAPD_CONFIG": str(absent)}).startswith(
        f"{absent}: the configuration cannot be read"
    )
    assert refused(tmp_path).endswith("cannot be read: Is a directory")
    assert "cannot be read" in refused(Path("nul\0"))
    assert "SNAPD_CONFIG is empty" in refused(env={"SNAPD_CONFIG": ""})


def test_a_huge_file_is_refused_without_reading_it_all():
    assert refused(Path("/dev/zero")) == "/dev/zero: larger than 1 MiB: no configuration file"


# --- relations --------------------------------------------------------------------------------


def test_a_socket_path_too_long_for_a_unix_socket_is_refused():
    longest = "/" + "s" * (SOCKET_PATH_BYTES_MAX - 1)
    assert load_config(None, {}, {"socket_path": longest}).socket_path == longest
    message = refused(overrides={"socket_path": longest + "s"})
    assert "is 108 bytes long" in message
    assert "(command line)" in message
    # 106 characters, of which one takes three bytes.
    assert "is 108 bytes long" in refused(overrides={"socket_path": longest[:-2] + "\u20ac"})


def test_a_default_socket_path_that_is_too_long_is_refused_too():
    assert "(default)" in refused(env={"RUNTIME_DIRECTORY": "/" + "r" * 107})


@pytest.mark.parametrize("key", ["socket_path", "log_path"])
def test_a_path_with_a_nul_is_refused(key):
    assert f"{key} = 'a\\x00b'" in refused(overrides={key: "a\0b"})


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"lease_ms": 300_000}, ("lease_ms = 300000 (command line)", "ready_ttl_ms = 300000 (default)")),
        ({"ready_ttl_ms": 10_000}, ("lease_ms = 10000 (default)", "raise the second")),
        ({"alignment_bytes": 257}, ("alignment_bytes = 257", "power of two")),
        ({"alignment_bytes": 128}, ("write a size from 256 B to 1 MiB",)),
        (
            {"register_piece_bytes": 2 * MIB - 256},
            ("register_piece_bytes = 2096896", "rank 0, 8 GiB, into more than 4096 pieces"),
        ),
        ({"register_piece_bytes": 300}, ("register_piece_bytes = 300", "alignment_bytes = 256 (default)")),
        (
            {"reply_buffer_bytes_max": "2MiB"},
            ("reply_buffer_bytes_max = 2097152", "frame_bytes_max = 4194304 (default)"),
        ),
        ({"page_keys_max": 200_000}, ("page_keys_max = 200000", "frame_bytes_max = 4194304 (default)")),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused_with_both_origins(values, wanted):
    message = refused(overrides=values)
    assert all(part in message for part in wanted)


@pytest.mark.parametrize(
    "values",
    [
        {"lease_ms": 299_999},
        {"alignment_bytes": "1MiB"},
        {"register_piece_bytes": 2 * MIB},
        {"reply_buffer_bytes_max": "4MiB"},
        {"page_keys_max": 120_000},
    ],
)
def test_settings_that_just_fit_together_are_taken(values):
    load(None, {}, values)


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_ms": 0},
        {"transport": "rdma"},
        {"arenas": ()},
        {"arenas": (ArenaConfig(device="gpu"),)},
        {"arenas": (ArenaConfig(), ArenaConfig())},
        {"hugepages": "maybe"},
        {"mooncake": MooncakeConfig(notify_poll_ms=0)},
        {"mooncake": MooncakeConfig(settings={"MC_A": 5})},
        {"mooncake": MooncakeConfig(settings={"PATH": "/"})},
    ],
)
def test_a_config_made_without_loading_can_be_checked(changes):
    with pytest.raises(ConfigError):
        msgspec.structs.replace(Config(), **changes).check()


def test_a_table_made_without_loading_is_refused_by_its_key():
    config = Config(mooncake=MooncakeConfig(notify_poll_ms=0, settings={}))
    with pytest.raises(ConfigError, match=r"^config: mooncake\.notify_poll_ms = 0 is wrong"):
        config.check()


def test_a_config_is_frozen():
    with pytest.raises(AttributeError):
        Config().lease_ms = 5  # type: ignore[misc]


# --- mooncake ---------------------------------------------------------------------------------


def test_each_key_of_mooncake_comes_from_the_highest_source_that_names_it(toml):
    path = toml(
        '[mooncake]\nprotocol = "rdma"\nhost = "a"\ndevices = "mlx5_0"\n'
        '[mooncake.settings]\nMC_A = "1"\nMC_B = "2"'
    )
    env = {
        "SNAPD_MOONCAKE_HOST": "b",
        "SNAPD_MOONCAKE_DEVICES": "mlx5_1",
        "SNAPD_MOONCAKE_NOTIFY_POLL_MS": "5",
    }
    flags = {"mooncake.devices": "mlx5_2", "mooncake.settings.MC_B": "3", "transport": "mooncake"}
    loaded = load(path, env, flags)
    assert loaded.config.transport == "mooncake"
    assert loaded.config.mooncake == MooncakeConfig(
        protocol="rdma", host="b", devices="mlx5_2", notify_poll_ms=5, settings={"MC_A": "1", "MC_B": "3"}
    )
    assert {key: value for key, value in loaded.origin.items() if key.startswith("mooncake.")} == {
        "mooncake.protocol": str(path),
        "mooncake.host": "environment SNAPD_MOONCAKE_HOST",
        "mooncake.devices": "command line",
        "mooncake.metadata_server": "default",
        "mooncake.notify": "default",
        "mooncake.notify_poll_ms": "environment SNAPD_MOONCAKE_NOTIFY_POLL_MS",
        "mooncake.settings": "default",
        "mooncake.settings.MC_A": str(path),
        "mooncake.settings.MC_B": "command line",
    }


def test_mooncake_may_be_a_flag_that_is_typed_already():
    wanted = MooncakeConfig(protocol="rdma", settings={"MC_A": "1"})
    assert load_config(None, {}, {"mooncake": wanted}).mooncake == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mooncake = 5", ": mooncake = 5 is wrong"),
        ("mooncake = 5", "write a [mooncake] table, or its keys one by one, such as mooncake.protocol"),
        ("[[mooncake]]", "write a [mooncake] table"),
        ('[mooncake]\nprotocl = "tcp"', ": [mooncake]: 'protocl' is no setting; did you mean 'protocol'?"),
        ('[mooncake]\nprotocol = "udp"', 'write "nvlink_intra" or "rdma" or "tcp"'),
        ('[mooncake]\nhost = ""', ": mooncake.host = '' is wrong"),
        ('[mooncake]\nhost = ""', 'write a host name or address, such as "10.0.0.7"'),
        ('[mooncake]\nhost = "a b"', "write a host name or address"),
        ('[mooncake]\nhost = "a\\u0000"', "write a host name or address"),
        ('[mooncake]\nhost = "a\\n"', "write a host name or address"),
        ('[mooncake]\nhost = "a..b"', "write a host name or address"),
        ('[mooncake]\nhost = ".a"', "write a host name or address"),
        (f'[mooncake]\nhost = "x.{"a" * 64}.y"', "write a host name or address"),
        ('[mooncake]\nmetadata_server = "http://a\\u00e9"', "metadata server"),
        ('[mooncake]\ndevices = "mlx5_0\\n"', "write names with commas between them"),
        ("[mooncake]\nnotify_poll_ms = 0", "write a whole number from 1 to 60000"),
        ("[mooncake]\nsettings = 5", "write a [mooncake.settings] table"),
        ("[mooncake.settings]\nMC_A = 5", ": mooncake.settings.MC_A = 5 is wrong"),
        ("[mooncake.settings]\nMC_A = 5", 'write text, such as "3"'),
        ('[mooncake.settings]\nPATH = "/"', ": [mooncake.settings] = 'PATH' is wrong"),
        ('[mooncake.settings]\nPATH = "/"', "write the name of one of Mooncake's variables"),
        ('[mooncake.settings]\n"MC_A\\n" = "1"', "write the name of one of Mooncake's variables"),
        ('[mooncake.settings]\nMC_A = "\\u0000"', 'write text, such as "3"'),
    ],
)
def test_a_wrong_mooncake_table_is_refused_with_file_key_and_what_to_write(toml, text, wanted):
    path = toml(text)
    message = refused(path)
    assert message.startswith(f"{path}: ")
    assert wanted in message


def test_a_wrong_key_of_mooncake_from_elsewhere_is_refused_by_its_name_there():
    assert "did you mean 'mooncake.protocol'?" in refused(overrides={"mooncake.protocl": "tcp"})
    assert "[mooncake.settings] = 'PATH'" in refused(overrides={"mooncake.settings.PATH": "/"})
    assert "keys one by one" in refused(overrides={"mooncake": "tcp"})
    assert "did you mean 'SNAPD_MOONCAKE_HOST'?" in refused(env={"SNAPD_MOONCAKE_HOTS": "a"})
    assert refused(env={"SNAPD_MOONCAKE_NOTIFY": "x"}).startswith("environment: SNAPD_MOONCAKE_NOTIFY = 'x'")
    assert "set Mooncake's own variables" in refused(env={"SNAPD_MOONCAKE_SETTINGS": "MC_A=1"})


# --- limits -----------------------------------------------------------------------------------


def test_each_key_of_limits_comes_from_the_highest_source_that_names_it(toml):
    path = toml('[limits]\ncongested_bytes = "32KiB"\nlog_close_ms = 1000\naccept_backlog = 7')
    env = {"SNAPD_LIMITS_LOG_CLOSE_MS": "2000", "SNAPD_LIMITS_ACCEPT_BACKLOG": "8"}
    loaded = load(path, env, {"limits.accept_backlog": "9"})
    assert loaded.config.limits == Limits(congested_bytes=32 * KIB, log_close_ms=2_000, accept_backlog=9)
    set_ones = {key: value for key, value in loaded.origin.items() if value != "default"}
    assert set_ones == {
        "limits.congested_bytes": str(path),
        "limits.log_close_ms": "environment SNAPD_LIMITS_LOG_CLOSE_MS",
        "limits.accept_backlog": "command line",
    }


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("limits = 5", "write a [limits] table, or its keys one by one, such as limits.accept_backlog"),
        ("[limits]\naccept_backlogs = 5", "did you mean 'accept_backlog'?"),
        ("[limits]\naccept_backlog = 0", "limits.accept_backlog = 0 is wrong"),
        ("[limits]\ncongested_bytes = 1", "write a size from 1 KiB to 1 GiB"),
        ("[limits]\nretry_after_ms_max = 19", "write a whole number from 20 to 3600000"),
        ("[limits]\nlog_close_ms = 30000", "must be below limits.stop_grace_ms = 30000 (default)"),
        ("[limits]\nstop_grace_ms = 5000", "limits.log_close_ms = 5000 (default) must be below"),
        (
            "[limits]\nkv_events_linger_ms = 25000",
            "limits.log_close_ms = 5000 (default) together must be below limits.stop_grace_ms = 30000",
        ),
        (
            "[limits]\nnotifications_chars_max = 1000",
            "must not be above limits.notifications_chars_max = 1000",
        ),
    ],
)
def test_a_wrong_limit_is_refused_with_file_key_and_what_to_write(toml, text, wanted):
    message = refused(toml(text))
    assert wanted in message


def test_limits_made_without_loading_are_checked_too():
    with pytest.raises(ConfigError, match=r"^config: limits\.log_close_ms = 0 is wrong"):
        Config(limits=Limits(log_close_ms=0)).check()


def test_every_limit_has_a_range_that_holds_its_default():
    for field in msgspec.structs.fields(Limits):
        meta = msgspec.inspect.type_info(field.type).type
        assert meta.ge <= field.default <= meta.le, field.name


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_means_every_address_is_refused(host):
    flags = {"transport": "mooncake", "mooncake.host": host}
    assert refused(overrides=flags).startswith(f"mooncake.host = {host!r} (command line) is no address")
    assert load_config(None, {}, flags | {"transport": "shm"}).mooncake.host == host


@pytest.mark.parametrize(
    "host", ["h", "node-7.example.com", "127.0.0.1", "fe80::1%eth0", f"{'a' * 63}.b", "a."]
)
def test_hosts_that_may_resolve_are_taken(host):
    assert load_config(None, {"SNAPD_MOONCAKE_HOST": host}, {}).mooncake.host == host


def test_what_is_no_utf8_is_refused_before_a_client_could_be_told():
    for key in ("host", "metadata_server", "devices"):
        assert "is wrong" in refused(env={f"SNAPD_MOONCAKE_{key.upper()}": "\udcff"})
    assert "is wrong" in refused(overrides={"mooncake.settings.MC_A": "\udcff"})


def test_nvlink_with_an_arena_on_the_host_is_refused_only_when_mooncake_is_used(toml):
    path = toml('mooncake.protocol = "nvlink_intra"\ntransport = "mooncake"')
    message = refused(path)
    assert message.startswith(f"mooncake.protocol = 'nvlink_intra' ({path})")
    assert "arena 0 (default)" in message and 'device = "cuda:N"' in message and '"tcp"' in message
    assert load_config(path, {}, {"transport": "shm"}).mooncake.protocol == "nvlink_intra"
    assert load_config(path, {}, {"device": "cuda:0"}).transport == "mooncake"


# --- schema -----------------------------------------------------------------------------------


def test_every_key_of_the_schema_is_described_and_none_is_open():
    schema = config_schema()
    for name in ("Config", "ArenaConfig", "MooncakeConfig"):
        definition = schema["$defs"][name]
        assert definition["additionalProperties"] is False
        undescribed = [key for key, value in definition["properties"].items() if not value.get("description")]
        assert undescribed == []
    assert {"arena", "ranks", "size", "device", "lease_ms"} <= set(schema["$defs"]["Config"]["properties"])
    json.dumps(schema)


def inline(value) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.parametrize(
    ("document", "valid"),
    [
        ({}, True),
        ({"size": "8GiB", "ranks": 2, "frame_bytes_max": "1MiB", "lease_ms": 5}, True),
        ({"arena": [{"rank": 1, "device": "cuda:0", "size_bytes": "1GiB"}]}, True),
        ({"lease_ms": "5"}, False),
        ({"lease_ms": 0}, False),
        ({"unknown": 0}, False),
        ({"arena": []}, False),
        ({"device": "cuda"}, False),
        ({"mooncake": {"protocol": "rdma", "settings": {"MC_GID_INDEX": "3"}}}, True),
        ({"mooncake": {"settings": {"GID_INDEX": "3"}}}, False),
        ({"mooncake": {"settings": {"MC_GID_INDEX": 3}}}, False),
        ({"mooncake": {"protocl": "rdma"}}, False),
    ],
)
def test_the_schema_takes_what_the_loader_takes(document, valid, tmp_path):
    assert jsonschema.Draft202012Validator(config_schema()).is_valid(document) is valid
    path = tmp_path / "document.toml"
    arenas = document.get("arena", ())
    lines = [
        f"{key} = {json.dumps(value)}" for key, value in document.items() if key not in ("arena", "mooncake")
    ]
    lines += ["arena = []"] if document.get("arena") == [] else []
    lines += [f"mooncake.{key} = {inline(value)}" for key, value in document.get("mooncake", {}).items()]
    for arena in arenas:
        lines += ["[[arena]]", *(f"{key} = {json.dumps(value)}" for key, value in arena.items())]
    path.write_text("\n".join(lines))
    if valid:
        load(path, {}, {})
    else:
        refused(path)


def test_a_config_written_out_is_read_back_equal():
    config = load_config(None, {"SNAPD_RANKS": "2"}, {"lease_ms": 77})
    assert msgspec.convert(msgspec.to_builtins(config), Config) == config
