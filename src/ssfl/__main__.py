"""The command `ssfl`, and `python -m ssfl`."""

import signal


def main() -> None:
    """Until the command line itself is imported, Ctrl-C ends the process without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ssfl import cli

    cli.main()


if __name__ == "__main__":
    main()
