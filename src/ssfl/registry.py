"""Names for the things a user can choose: algorithms, SSL methods, data sources, transports.

A registry maps a name to "module:attribute" and imports it on first use, so that listing what
exists costs nothing and adding something is one file and one line. A name that is not known may be
a plug-in's: those are imported once, when such a name is first asked for.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ssfl.errors import ConfigError


class Registry(Mapping[str, Any]):
    """Lazily imported objects by name; an unknown name is an error that lists the known ones."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._targets = dict(entries)

    def __getitem__(self, name: str) -> Any:
        complaints = [] if name in self._targets else import_plugins()
        if name not in self._targets:
            own = "SSFL_PLUGINS names modules with your own (docs/adding-an-algorithm.md)"
            raise ConfigError(
                f"unknown {self.kind} '{name}': choose one of {', '.join(sorted(self._targets))}; "
                f"{'; '.join(complaints) or own}"
            )
        return self._found(name, self._targets[name])

    def _found(self, name: str, target: str) -> Any:
        module, _, attribute = target.partition(":")
        whose = f"{self.kind} '{name}' is registered as {target}, but"
        try:
            found = import_module(module)
        except ImportError as error:
            raise ConfigError(f"{whose} {module} cannot be imported ({error})") from error
        if not hasattr(found, attribute):
            raise ConfigError(f"{whose} {module} has no {attribute}")
        return getattr(found, attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def targets(self) -> dict[str, str]:
        """Every name with its "module:attribute", to be registered in another process."""
        return dict(self._targets)

    def register(self, name: str, target: str) -> None:
        """Add an entry of one's own, e.g. `register("mine", "my_package.mine:MyAlgorithm")`.

        It may be repeated, as a notebook's cell is. A name that is taken stays with whose it is.
        """
        if not re.fullmatch(r"[\w.]+:\w+", str(target)):
            raise ConfigError(
                f"{self.kind} '{name}' is registered by where it is found, "
                f'f"{{__name__}}:ItsClass", not as {target!r}'
            )
        if (taken := self._targets.get(name, target)) != target:
            raise ConfigError(f"{self.kind} '{name}' is {taken} already: choose another name")
        self._targets[name] = target


_complaints: list[str] | None = None


def import_plugins() -> list[str]:
    """Import what registers more names, and say what could not be imported: modules that installed
    packages name as entry points `ssfl.plugins`, and those of SSFL_PLUGINS (names between commas),
    which are also looked for in the working directory."""
    global _complaints
    if _complaints is None:
        _complaints = []  # before any import: a plug-in may ask for names itself
        plugins = {entry.value: entry.load for entry in entry_points(group="ssfl.plugins")}
        for module in filter(None, os.environ.get("SSFL_PLUGINS", "").replace(" ", "").split(",")):
            plugins[module] = partial(_import_from_here, module)
        for name, load in plugins.items():
            try:
                load()
            except (Exception, SystemExit) as error:  # whatever a stranger's module does
                what = f"{type(error).__name__}: {error}"
                _complaints.append(f"the plug-in {name} could not be imported ({what})")
    return _complaints


def _import_from_here(module: str) -> None:
    """Import a module that may be in the working directory, which a command's path is without."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    import_module(module)
