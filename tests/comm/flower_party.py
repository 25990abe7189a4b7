"""A party of a federation, as a process: `flower_party.py serve|site ...`, like `ssfl serve|site`.

With NAP=ROUND:SECONDS in the environment a site sleeps before it trains in that round, the first
time. With RECORD=FOLDER, it and the programs it starts write every byte of every request they send
to files in FOLDER. With AHEAD=SECONDS, the clock of all of them is wrong by so much; with
BEAT=SECONDS, that is how often their hearts beat. With SPOIL=ROUND, some of its clients send what
cannot be right (`SPOILT`). With GARBLE=ROUND, its message of that round is one that Flower cannot
read.
"""

import logging
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path


def everywhere(environment) -> None:
    """What befalls a party's own process and the programs it starts alike."""
    if "RECORD" in environment:
        record(Path(environment["RECORD"]))
    if "AHEAD" in environment:
        from flwr.supercore import date

        now, ahead = date.now, timedelta(seconds=float(environment["AHEAD"]))
        date.now = lambda: now() + ahead
    if "BEAT" in environment:
        from flwr.common import constant

        constant.HEARTBEAT_DEFAULT_INTERVAL = int(environment["BEAT"])


def record(folder: Path) -> None:
    """Have httpx, which all of Flower's requests go through, keep what it sends."""
    import httpx

    send = httpx.Client.send

    def send_and_keep(self, request, **options):
        with (folder / f"{os.getpid()}.bin").open("ab") as file:
            file.write(f"{request.method} {request.url} {request.headers}\n".encode())
            file.write(request.read())
        return send(self, request, **options)

    httpx.Client.send = send_and_keep


def nap(round_: int, seconds: float) -> None:
    """Have the site sleep before it trains in a round, the first time."""
    from ssfl.comm.flower.host import SiteKeeper
    from ssfl.federation.messages import TaskKind

    prepare, rested = SiteKeeper.prepare, []

    def sleep_and_prepare(self, task):
        if task.kind is TaskKind.TRAIN and task.round == round_ and not rested:
            rested.append(task.round)
            time.sleep(seconds)
        prepare(self, task)

    SiteKeeper.prepare = sleep_and_prepare


SPOILT = {
    0: lambda reply: replace(reply, delta=100 * reply.delta),
    1: lambda reply: replace(reply, delta=reply.delta[:-1]),
    2: lambda reply: replace(reply, round=reply.round + 7),
    3: lambda reply: replace(reply, delta=reply.delta * float("nan")),
}
"""What is wrong with whose reply."""


def spoil(round_: int) -> None:
    """Have the site answer for some of its clients with what must be refused."""
    from ssfl.comm.local import LocalCommunicator

    exchange = LocalCommunicator.exchange

    def exchange_badly(self, task, clients, deadline=None):
        for reply in exchange(self, task, clients, deadline):
            bad = task.round == round_ and reply.delta is not None and reply.client in SPOILT
            yield SPOILT[reply.client](reply) if bad else reply

    LocalCommunicator.exchange = exchange_badly


def garble(round_: int) -> None:
    """Have the site send a record whose head is well and whose body is nonsense."""
    from ssfl.comm.flower import site

    write = site.write_replies

    def write_badly(replies):
        content = write(replies)
        if replies[0].round == round_:
            content["replies"].deflate = lambda: b"ConfigRecord  4\0oops"
        return content

    site.write_replies = write_badly


def main() -> None:
    import typer

    from ssfl.commands import federation
    from ssfl.errors import SSFLError
    from ssfl.interrupts import stoppable

    if "NAP" in os.environ:
        round_, _, seconds = os.environ["NAP"].partition(":")
        nap(int(round_), float(seconds))
    if "SPOIL" in os.environ:
        spoil(int(os.environ["SPOIL"]))
    if "GARBLE" in os.environ:
        garble(int(os.environ["GARBLE"]))
    logging.basicConfig(level=logging.WARNING)  # as the command line does
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("certs")(federation.certs)
    app.command("serve")(federation.serve)
    app.add_typer(federation.site, name="site")
    try:
        with stoppable():  # as the command line is
            app()
    except SSFLError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
