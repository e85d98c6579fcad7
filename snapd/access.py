"""Who may do what: rules of the configuration, and the rights that a connection gets by them.

Roles follow the parties of the protocol: a ``pusher`` is D, an ``ingester`` is P, an ``operator`` looks after
the daemon. Whoever is bound to tenants sees the snapshots of those only.

Source: design, section 5.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from snapd.errors import ConfigError
from snapd.layout import NAME_CHARS_MAX

RoleName = Literal["pusher", "ingester", "operator"]
ALL_ROLES: Final[frozenset[RoleName]] = frozenset({"pusher", "ingester", "operator"})
UID_MAX: Final = 2**32 - 2
# A name in a certificate, as it is shown; longer ones match no rule.
CERTIFICATE_NAME_CHARS_MAX: Final = 255


class AccessRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One ``[[access]]`` table of the file: whom it is for, and what they may do."""

    certificate: Annotated[
        str,
        Meta(
            max_length=CERTIFICATE_NAME_CHARS_MAX,
            description="For clients over TLS whose certificate has this name (DNS or URI; the common name "
            "if there is neither). `*` stands for anything: `d-*.example`.",
            extra={"wanted": 'write a name, such as "d-0.example" or "d-*.example"'},
        ),
    ] = ""
    uid: Annotated[
        int, Meta(ge=-1, le=UID_MAX, description="For local users of this number. -1: for none.")
    ] = -1
    loopback: Annotated[
        bool,
        Meta(
            description="For whoever connects to `tcp_address` without TLS, which is any user of this host."
        ),
    ] = False
    roles: Annotated[
        tuple[RoleName, ...],
        Meta(
            min_length=1,
            max_length=len(ALL_ROLES),
            description="What they may do: `pusher` (D), `ingester` (P), `operator`.",
            extra={"wanted": 'write a list such as ["pusher"]; roles are "pusher", "ingester", "operator"'},
        ),
    ] = ("pusher",)
    tenants: Annotated[
        tuple[Annotated[str, Meta(max_length=NAME_CHARS_MAX)], ...],
        Meta(
            max_length=1024,
            description="The tenants whose snapshots they may touch. Empty: all.",
            extra={"wanted": 'write a list of names, such as ["team-a"]'},
        ),
    ] = ()


def check_rules(rules: Iterable[AccessRule], allowed_uids: Iterable[int]) -> None:
    """Check that every rule says whom it is for, and that they do not contradict each other.

    Raises:
        ConfigError: one does not; the message names it by its place, from 0.
    """
    uids: set[int] = set()
    for number, rule in enumerate(rules):
        where = f"access[{number}]"
        if (bool(rule.certificate), rule.uid >= 0, rule.loopback).count(True) != 1:
            raise ConfigError(f"{where}: set exactly one of certificate, uid and loopback: whom is it for?")
        if rule.tenants and "operator" in rule.roles:
            raise ConfigError(f"{where}: an operator sees all tenants: remove tenants, or the role operator")
        if rule.uid in allowed_uids:
            raise ConfigError(
                f"{where}: user {rule.uid} is in allowed_uids, which gives every right: remove one of them"
            )
        if rule.uid >= 0 and rule.uid in uids:
            raise ConfigError(f"{where}: user {rule.uid} has a rule already: put its roles in one")
        uids.add(rule.uid)


@dataclass(frozen=True, slots=True)
class Rights:
    """What a connection may do.

    Attributes:
        owner: who it is, in the same words for every connection of the same client; attempts belong to it.
        roles: what it may do.
        tenants: whose snapshots; None: everybody's.
        is_full: every role for every tenant, and the attempts of others too.
    """

    owner: str
    roles: frozenset[RoleName] = ALL_ROLES
    tenants: frozenset[str] | None = None
    is_full: bool = False


class Access:
    """The rules, as looked up for a new connection.

    Args:
        rules: of the configuration; the first that fits counts.
        full_uids: users who may do everything.
    """

    def __init__(self, rules: Iterable[AccessRule], full_uids: Iterable[int]) -> None:
        self.full_uids = frozenset(full_uids)
        self._rules = tuple(rules)

    def of_uid(self, uid: int) -> Rights | None:
        """Return the rights of a local user, or None."""
        owner = f"uid {uid}"
        if uid in self.full_uids:
            return Rights(owner, is_full=True)
        return next((_rights(rule, owner) for rule in self._rules if rule.uid == uid >= 0), None)

    def of_certificate(self, names: Iterable[str]) -> Rights | None:
        """Return the rights of a client by the names in its certificate, or None."""
        usable = [name for name in names if 0 < len(name) <= CERTIFICATE_NAME_CHARS_MAX]
        for rule in self._rules:
            for name in usable:
                if rule.certificate and fnmatch.fnmatchcase(name, rule.certificate):
                    return _rights(rule, f"certificate {name}")
        return None

    def of_loopback(self) -> Rights | None:
        """Return the rights of whoever connects over TCP without TLS, or None."""
        return next((_rights(rule, "loopback") for rule in self._rules if rule.loopback), None)


def _rights(rule: AccessRule, owner: str) -> Rights:
    return Rights(owner, frozenset(rule.roles), frozenset(rule.tenants) if rule.tenants else None)
