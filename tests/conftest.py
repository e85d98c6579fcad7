"""What every test can rely on."""

import signal


def pytest_configure() -> None:
    """Have programs that tests start end on SIGINT and SIGHUP.

    A shell that runs tests in the background has them ignore the one, nohup the other; what is ignored is
    inherited, and Python leaves it so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
