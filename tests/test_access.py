"""Rules: whom they are for, which one counts, and which are refused."""

from pathlib import Path

import pytest

from snapd.access import ALL_ROLES, Access, AccessRule, Rights, check_rules
from snapd.config import load
from snapd.errors import ConfigError
from snapd.tcplistener import names_of

PUSHER = AccessRule(certificate="d-*", roles=("pusher",))


def test_a_user_with_every_right_needs_no_rule() -> None:
    access = Access([AccessRule(uid=7, roles=("ingester",))], {0, 5})
    assert access.of_uid(5) == Rights("uid 5", ALL_ROLES, None, is_full=True)
    assert access.of_uid(7) == Rights("uid 7", frozenset({"ingester"}))
    assert access.of_uid(8) is None


@pytest.mark.parametrize(
    ("names", "owner"),
    [
        (["d-1"], "certificate d-1"),
        (["x", "d-2.example"], "certificate d-2.example"),
        (["D-1"], None),
        (["xd-1"], None),
        ([""], None),
        ([], None),
        (["d-" + "x" * 254], None),
    ],
)
def test_a_certificate_counts_by_a_name_that_fits(names: list[str], owner: str | None) -> None:
    rights = Access([PUSHER], ()).of_certificate(names)
    assert (rights.owner if rights else None) == owner


def test_a_certificate_has_its_dns_and_uri_names_or_else_its_common_name() -> None:
    subject = ((("organizationName", "d-0"),), (("commonName", "cn"),))
    others = (("IP Address", "10.0.0.1"), ("email", "d-0"), ("Registered ID", "1.2"))
    assert names_of({"subject": subject, "subjectAltName": (("URI", "u:d"), *others, ("DNS", "d"))}) == [
        "u:d",
        "d",
    ]
    assert names_of({"subject": subject, "subjectAltName": others}) == ["cn"]
    assert names_of(None) == names_of({}) == []
    many = tuple(("DNS", f"d-{number}") for number in range(9_000))
    assert len(names_of({"subjectAltName": many})) == 64, "they are held against the rules while others wait"


def test_the_first_rule_that_fits_counts() -> None:
    access = Access([AccessRule(certificate="d-0", roles=("operator",)), PUSHER], ())
    assert access.of_certificate(["d-0"]) == Rights("certificate d-0", frozenset({"operator"}))
    assert access.of_certificate(["d-1"]) == Rights("certificate d-1", frozenset({"pusher"}))


def test_a_rule_for_one_kind_of_client_is_for_no_other() -> None:
    rules = [AccessRule(uid=7), AccessRule(loopback=True, tenants=("a",))]
    access = Access(rules, ())
    assert access.of_certificate(["", "7", "loopback"]) is None
    assert access.of_loopback() == Rights("loopback", frozenset({"pusher"}), frozenset({"a"}))
    assert Access([PUSHER], ()).of_loopback() is None
    assert Access([PUSHER], ()).of_uid(-1) is None


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ([AccessRule()], r"access\[0\]: set exactly one"),
        ([PUSHER, AccessRule(certificate="x", uid=3)], r"access\[1\]: set exactly one"),
        ([AccessRule(certificate="x", loopback=True)], "set exactly one"),
        ([AccessRule(uid=5)], "user 5 is in allowed_uids"),
        ([AccessRule(uid=7), AccessRule(uid=7)], r"access\[1\]: user 7 has a rule already"),
        ([AccessRule(uid=7, roles=("operator",), tenants=("a",))], "an operator sees all tenants"),
    ],
)
def test_rules_that_do_not_say_what_they_mean_are_refused(rules: list[AccessRule], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_rules(rules, {0, 5})


TLS = 'tls_certificate_path = "a"\ntls_key_path = "b"\ntls_client_ca_path = "c"\n'
RULE = '[[access]]\ncertificate = "d"\n'
OPEN = "[[access]]\nloopback = true\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('tcp_address = "0.0.0.0:1"\n' + OPEN, "there is no TLS"),
        ('tcp_address = "[::]:1"\n' + OPEN, "there is no TLS"),
        ('tcp_address = "10.1.2.3:1"\n' + OPEN, "there is no TLS"),
        ('tcp_address = "somewhere:1"\n' + TLS + RULE, "is no address"),
        ('tcp_address = "127.0.0.1:1"\n', "nobody would be let in"),
        ('tcp_address = "127.0.0.1:1"\n' + RULE, "no .*loopback = true"),
        ('tcp_address = "127.0.0.1:1"\n' + TLS, "no .* names a certificate"),
        ('tcp_address = "127.0.0.1:1"\n' + TLS + OPEN, "no .* names a certificate"),
        (
            'tcp_address = "127.0.0.1:1"\ntls_key_path = "x"\n' + RULE,
            "tls_certificate_path and tls_client_ca",
        ),
        (TLS, "for tcp_address, which is empty"),
        ('[[access]]\ncertificate = "d"\nroles = []\n', "roles"),
        ('[[access]]\ncertificate = "d"\nroles = ["king"]\n', "roles are"),
        ('[[access]]\ncertificat = "d"\n', "did you mean 'certificate'"),
    ],
)
def test_a_listener_that_would_be_open_or_of_no_use_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "snapd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        load(path, {}, {})


@pytest.mark.parametrize(
    "text",
    [
        'tcp_address = "0.0.0.0:1"\n' + TLS + RULE,
        'tcp_address = ":1"\n' + OPEN,
        'tcp_address = "[::1]:1"\n' + OPEN,
        RULE,
    ],
)
def test_a_listener_that_is_fine_is_taken(tmp_path: Path, text: str) -> None:
    path = tmp_path / "snapd.toml"
    path.write_text(text)
    assert load(path, {}, {}).config.access


def test_a_rule_for_a_user_opens_the_socket_to_others(tmp_path: Path) -> None:
    path = tmp_path / "snapd.toml"
    for text, is_open in ((RULE, False), ("[[access]]\nuid = 9\n", True), ("allowed_uids = [9]\n", True)):
        path.write_text(text)
        assert load(path, {}, {}).config.is_open_to_other_users is is_open
