"""What every test can rely on."""

import signal


def pytest_configure() -> None:
    """Have programs that tests start end on SIGINT; a shell that runs tests in the background has it ignored.

    What is ignored is inherited, and Python leaves it so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
