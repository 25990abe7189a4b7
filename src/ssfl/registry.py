"""Names for the things a user can choose: algorithms, SSL methods, data sources, transports.

A registry maps a name to "module:attribute" and imports it on first use, so that listing what
exists costs nothing and adding something is one file and one line.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ssfl.errors import ConfigError


class Registry(Mapping[str, Any]):
    """Lazily imported objects by name; an unknown name is an error that lists the known ones."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._targets = dict(entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self._targets:
            raise ConfigError(
                f"unknown {self.kind} '{name}': choose one of {', '.join(sorted(self._targets))}; "
                "one of your own is known once its module is imported (docs/adding-an-algorithm.md)"
            )
        module, _, attribute = self._targets[name].partition(":")
        return getattr(import_module(module), attribute)

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
        """Add an entry of one's own, e.g. `register("mine", "my_package.mine:MyAlgorithm")`."""
        self._targets[name] = target
