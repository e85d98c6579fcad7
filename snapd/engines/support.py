"""What every engine's adapter needs: its settings, and which releases of the engine it was tested with.

Source: design, section 9.
"""

import importlib.metadata
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, overload

import msgspec
import structlog

from snapd.config import default_socket_path
from snapd.configvalues import known
from snapd.errors import ConfigError
from snapd.layout import NAME_CHARS_MAX

if TYPE_CHECKING:
    from snapd.kv.integrity import KeyedIntegrity

_log: Final = structlog.get_logger("snapd.engines")

Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3_600)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set, in the engine's own place for a plugin's settings.

    Attributes:
        socket_path: the daemon's socket.
        model: name of the weights, the same on P and D; empty: the engine's own name of the model.
        weight_version: changes when the weights do; KV of another version is never found.
        tenant: who may share snapshots.
        min_push_tokens: D pushes nothing shorter.
        min_load_tokens: P loads nothing that saves fewer tokens than this.
        timeout_s: how long a call to the daemon may take. The engine goes on without snapd then.
        retry_s: how long after a failed call the daemon is asked again.
        verify: compare checksums before anything is used. Off is for the tests that show what it is for.
        integrity_key_path: file of 32 or more random bytes, the same on P and D: bytes are compared by a MAC
            under this key; empty: by the usual checksum. For pools on the host.
        integrity_other_key_path: of a key that P accepts as well, while keys are changed; empty: none.
        integrity_algorithm: the same on P and D.
    """

    socket_path: str = msgspec.field(default_factory=lambda: default_socket_path(os.environ, os.geteuid()))
    model: Name = ""
    weight_version: Name = ""
    tenant: Name = ""
    min_push_tokens: Tokens = 0
    min_load_tokens: Tokens = 1
    timeout_s: Seconds = 1.0
    retry_s: Seconds = 1.0
    verify: bool = True
    integrity_key_path: str = ""
    integrity_other_key_path: str = ""
    integrity_algorithm: Literal["blake3", "blake2b"] = "blake3"


_SettingsT = TypeVar("_SettingsT", bound=EngineSettings)


@overload
def read_settings(given: Mapping[str, Any], source: str) -> EngineSettings: ...


@overload
def read_settings(given: Mapping[str, Any], source: str, kind: type[_SettingsT]) -> _SettingsT: ...


def read_settings(
    given: Mapping[str, Any], source: str, kind: type[EngineSettings] = EngineSettings
) -> EngineSettings:
    """Return the settings.

    Args:
        given: as the engine hands them over.
        source: what to call that place in an error.
        kind: of settings, for an engine that has more of them.

    Raises:
        ConfigError: a name is unknown, and which is the nearest; or a value is out of range, and which.
    """
    names = dict.fromkeys(kind.__struct_fields__)
    for name in given:
        known(source, name, names)
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from None


def read_integrity(settings: EngineSettings) -> "KeyedIntegrity | None":
    """Return what a ``Pusher`` or an ``Ingester`` takes as ``integrity``; None: there is no key.

    Raises:
        ConfigError: the settings contradict each other, or a key file is no good; says what to do.
        ExtraMissing: the package ``blake3`` is not installed.
    """
    if not settings.integrity_key_path:
        if settings.integrity_other_key_path:
            raise ConfigError("integrity_other_key_path is set, and integrity_key_path is not")
        return None
    if not settings.verify:
        raise ConfigError("verify is off, and integrity_key_path is set: leave one of the two out")
    from snapd.kv.integrity import KeyedIntegrity

    return KeyedIntegrity.from_files(
        settings.integrity_key_path,
        accepted_paths=[settings.integrity_other_key_path] if settings.integrity_other_key_path else [],
        algorithm=settings.integrity_algorithm,
    )


def check_version(engine: str, distributions: Collection[str], tested: Collection[str]) -> str:
    """Return the version of the engine that is installed, and warn if it was not tested with.

    Args:
        engine: its name, for people.
        distributions: names under which it is packaged; the first that is installed counts.
        tested: versions; a local part, as in ``0.32.0+cpu``, does not matter.
    """
    for distribution in distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split("+")[0] not in tested:
            _log.warning(
                "this release of the engine was not tested with snapd: watch its answers and its log",
                engine=engine, version=version, tested=sorted(tested),
            )  # fmt: skip
        return version
    _log.warning("the engine's version cannot be found out", engine=engine, tested=sorted(tested))
    return ""
