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
        plugins = {} if name in self._targets else import_plugins()
        if name not in self._targets:
            own = "SSFL_PLUGINS names modules with your own (docs/adding-an-algorithm.md)"
            complaints = [
                f"the plug-in {plugin} could not be imported ({why})"
                for plugin, why in plugins.items()
                if why
            ]
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
        thing = getattr(found, attribute)
        if missing := sorted(getattr(thing, "__abstractmethods__", ())):
            raise ConfigError(f"{whose} {attribute} has no {' and no '.join(missing)}: write it")
        return thing

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


_plugins: dict[str, str] | None = None


def import_plugins() -> dict[str, str]:
    """Import what registers more names, and say of each why it could not be ("" if it could):
    modules that installed packages name as entry points `ssfl.plugins`, and those of SSFL_PLUGINS
    (names between commas), which are also looked for in the working directory."""
    global _plugins
    if _plugins is None:
        _plugins = {}  # before any import: a plug-in may ask for names itself
        found = {entry.value: entry.load for entry in entry_points(group="ssfl.plugins")}
        for module in filter(None, map(str.strip, os.environ.get("SSFL_PLUGINS", "").split(","))):
            found[module] = partial(_import_from_here, module)
        for name, load in found.items():
            try:
                load()
                _plugins[name] = ""
            except (Exception, SystemExit) as error:  # whatever a stranger's module does
                _plugins[name] = " ".join(f"{type(error).__name__}: {error}".split())
    return _plugins


def _import_from_here(module: str) -> None:
    """Import a module that may be in the working directory, which a command's path is without."""
    if "/" in module or module.endswith(".py"):
        raise ImportError("SSFL_PLUGINS takes names of modules, without folder and .py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    import_module(module)
