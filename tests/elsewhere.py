"""The command line in a process whose other thread gets the signals.

What the main thread waits in is not interrupted then, as it is not either when a signal comes just before it
begins to wait.
"""

MAIN_ELSEWHERE = """
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
from snapd.cli.main import main
main()
"""
