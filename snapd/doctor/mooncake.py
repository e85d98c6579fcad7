"""Mooncake's package: which one, whether it is whole, and whether it loads."""

from collections.abc import Callable
from typing import Final

import msgspec

from snapd.doctor.finding import MOONCAKE, Finding
from snapd.doctor.selftest import SelfTestFailed, load_mooncake
from snapd.errors import TransportError
from snapd.transport.mooncake_package import (
    INSTALL_HELP,
    MissingLibrary,
    Package,
    find_package,
    install_command,
    installed_names,
    missing_libraries,
)

GROUP: Final = "mooncake"
_REINSTALL: Final = "install it anew, or another of its packages: " + INSTALL_HELP


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed of Mooncake.

    Attributes:
        package: the package; None: there is none.
        missing: shared libraries that it lacks.
        install: the command that helps; empty if nothing is missing.
        why_not: why it cannot be used; empty: it loads.
        supports: what this build can do, such as ``INTRA_NVLINK``.
        findings: all of this, for a person.
    """

    package: Package | None
    missing: tuple[MissingLibrary, ...] = ()
    install: str = ""
    why_not: str = ""
    supports: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def look(
    *, is_wanted: bool, timeout_s: float, load: Callable[[float], tuple[str, ...]] = load_mooncake
) -> Installed:
    """Return what is installed of Mooncake. It is loaded in a child only.

    Args:
        is_wanted: it is the configured transport.
        timeout_s: for loading it.
        load: loads it and returns what it can do.
    """
    package = find_package()
    if package is None:
        finding = Finding(
            group=GROUP,
            name="package",
            status="fail" if is_wanted else "info",
            detail="not installed",
            fix=INSTALL_HELP if is_wanted else "",
            concerns=MOONCAKE,
        )
        return Installed(
            package=None, install=INSTALL_HELP, why_not="Mooncake is not installed", findings=(finding,)
        )
    findings = [
        Finding(group=GROUP, name="package", status="ok", detail=f"{package.name} {package.version}".strip())
    ]
    names = installed_names()
    if len(names) > 1:
        others = " ".join(name for name in names if name != package.name)
        findings.append(
            Finding(
                group=GROUP,
                name="other packages",
                status="warn",
                detail=f"{others} overwrites the same module",
                fix=f"pip uninstall -y {' '.join(names)}, then install one of them",
            )
        )
    try:
        missing = tuple(missing_libraries(package))
    except TransportError as error:
        findings.append(_failure("engine", str(error), _REINSTALL))
        return Installed(package=package, why_not=str(error), findings=tuple(findings))
    if missing:
        install = install_command(missing)
        findings += (
            _failure(library.soname, f"missing, needed by {library.needed_by}", install_command([library]))
            for library in missing
        )
        if len(missing) > 1:
            findings.append(_failure("shared libraries", f"{len(missing)} are missing", install))
        why_not = f"shared libraries are missing: {', '.join(library.soname for library in missing)}"
        return Installed(
            package=package, missing=missing, install=install, why_not=why_not, findings=tuple(findings)
        )
    findings.append(Finding(group=GROUP, name="shared libraries", status="ok", detail="all found"))
    try:
        supports = load(timeout_s)
    except SelfTestFailed as error:
        findings.append(_failure("engine", str(error), _REINSTALL))
        return Installed(package=package, why_not=str(error), findings=tuple(findings))
    detail = f"loads, with {', '.join(supports)}" if supports else "loads; a build without CUDA"
    findings.append(Finding(group=GROUP, name="engine", status="ok", detail=detail))
    return Installed(package=package, supports=supports, findings=tuple(findings))


def _failure(name: str, detail: str, fix: str) -> Finding:
    return Finding(group=GROUP, name=name, status="fail", detail=detail, fix=fix, concerns=MOONCAKE)
