"""A party of a federation, as a process: `flower_party.py serve|site ...`, like `ssfl serve|site`.

It has the misfortunes that `six_clients.bad_days` gives it. With RECORD=FOLDER in the environment,
it and the programs it starts write every byte of every request they send to files in FOLDER.
"""

import os
import sys
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


def main() -> None:
    import typer
    from six_clients import bad_days

    from ssfl.comm import COMMUNICATORS
    from ssfl.commands import federation
    from ssfl.errors import SSFLError

    bad_days()
    COMMUNICATORS.register("flower", "ssfl.comm.flower.serve:connect")
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
