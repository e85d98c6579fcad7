"""``snapd completion``: what a shell needs to complete commands and options."""

from typing import Final

import click
from click.shell_completion import get_completion_class

from snapd.cli.common import echo

# What click looks for when the shell asks ``snapd`` to complete.
VARIABLE: Final = "_SNAPD_COMPLETE"


@click.command(
    epilog="""\b
Examples:
  snapd completion bash > /etc/bash_completion.d/snapd
  snapd completion bash > ~/.local/share/bash-completion/completions/snapd
  snapd completion zsh > "${fpath[1]}/_snapd"
  snapd completion fish > ~/.config/fish/completions/snapd.fish
  source <(snapd completion bash)

\b
bash needs to be 4.4 or newer. The script asks the snapd that is in PATH."""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes snapd's commands and options in SHELL."""
    from snapd.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    script = found(cli, {}, "snapd", VARIABLE)
    # Not source(): that runs bash to see how old it is, and there may be none where this is run.
    echo((script.source_template % script.source_vars()).rstrip("\n"))
