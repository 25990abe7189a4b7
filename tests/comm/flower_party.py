"""A party of a federation, as a process: `flower_party.py serve|site ...`, like `ssfl serve|site`.

With NAP=SECONDS in the environment a site sleeps before every training. With RECORD=FOLDER, it and
the programs it starts write every byte of every request they send to files in FOLDER.
"""

import os
import sys
import time
from pathlib import Path


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


def nap(seconds: float) -> None:
    """Have the site sleep before it trains."""
    from ssfl.comm.flower.host import SiteKeeper
    from ssfl.federation.messages import TaskKind

    prepare = SiteKeeper.prepare

    def sleep_and_prepare(self, task):
        if task.kind is TaskKind.TRAIN:
            time.sleep(seconds)
        prepare(self, task)

    SiteKeeper.prepare = sleep_and_prepare


def main() -> None:
    import typer

    from ssfl.commands import federation
    from ssfl.errors import SSFLError

    if "NAP" in os.environ:
        nap(float(os.environ["NAP"]))
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("certs")(federation.certs)
    app.command("serve")(federation.serve)
    app.add_typer(federation.site, name="site")
    try:
        app()
    except SSFLError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
