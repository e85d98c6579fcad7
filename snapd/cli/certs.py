"""``snapd certs``: certificates to try TLS with."""

from pathlib import Path
from typing import Final

import click

from snapd.cli.common import echo, json_option, print_json

DAYS_DEFAULT: Final = 365
PORT: Final = 9465


@click.group(
    epilog="""\b
Examples:
  snapd certs init ./certs --server snapd.example --client d-0 --client ops:operator
  snapd certs init --help"""
)
def certs() -> None:
    """Make certificates for clients of other hosts."""


@certs.command(
    epilog="""\b
Examples:
  snapd certs init ./certs --server snapd.example --client d-0 --client p-0:ingester
  snapd certs init ./certs --server 10.0.0.5 --client d-0 --days 30 --json

\b
What the daemon needs, and what a client writes for --socket, is printed. The CA's key lies in the same
directory: whoever has it can make certificates that the daemon believes. Keep it elsewhere."""
)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--server",
    "servers",
    metavar="NAME",
    multiple=True,
    required=True,
    help="Name or address under which clients reach the daemon; may be given several times.",
)
@click.option(
    "--client",
    "clients",
    metavar="NAME[:ROLE]",
    multiple=True,
    required=True,
    help="A client, by the name that an [[access]] table knows it by, and its role: pusher (which it is "
    "without one), ingester or operator. May be given several times.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=DAYS_DEFAULT,
    show_default=True,
    help="How long they are valid.",
)
@json_option
def init(
    directory: Path, servers: tuple[str, ...], clients: tuple[str, ...], days: int, as_json: bool
) -> None:
    """Make a private CA, and certificates for the daemon and its clients, in DIRECTORY."""
    from urllib.parse import quote

    from snapd.certs import make_certificates

    roles = dict(_role(client) for client in clients)
    if len(roles) != len(clients):
        raise click.UsageError("every --client needs a name of its own")
    made = make_certificates(directory.resolve(), servers, tuple(roles), days)
    where = f"[{servers[0]}]" if ":" in servers[0] else servers[0]
    addresses = {
        name: f"tls://{where}:{PORT}?ca={quote(str(made.ca))}&cert={quote(str(certificate))}"
        f"&key={quote(str(key))}"
        for name, (certificate, key) in made.certificates.items()
        if name != "server"
    }
    certificate, key = made.certificates["server"]
    settings = {
        "tls_certificate_path": str(certificate), "tls_key_path": str(key), "tls_client_ca_path": str(made.ca)
    }  # fmt: skip
    if as_json:
        print_json({"config": settings, "clients": addresses, "roles": roles})
        return
    echo("# for the daemon's TOML file")
    echo(f'tcp_address = "0.0.0.0:{PORT}"')
    for setting, path in settings.items():
        echo(f'{setting} = "{path}"')
    for name, role in roles.items():
        echo(f'[[access]]\ncertificate = "{name}"\nroles = ["{role}"]')
    echo("# what clients write in place of the socket's path")
    for name, address in addresses.items():
        echo(f"# {name}: {address}")


def _role(client: str) -> tuple[str, str]:
    from snapd.access import ALL_ROLES

    name, colon, role = client.rpartition(":")
    if not colon:
        return client, "pusher"
    if role not in ALL_ROLES:
        raise click.UsageError(f"--client {client}: {role!r} is no role: {', '.join(sorted(ALL_ROLES))}")
    return name, role
