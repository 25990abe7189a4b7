"""The recipes that come with the package, by name. Listing them needs nothing but their files."""

from importlib import resources

_FOLDER = resources.files(__name__)


def recipes() -> dict[str, str]:
    """Names of the recipes in the package, each with its first comment line."""
    names = (entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir())
    texts = {name: text for name in sorted(names) if (text := recipe(name)) is not None}
    return {name: text.splitlines()[0].lstrip("# ") for name, text in texts.items()}


def recipe(name: str) -> str | None:
    """A recipe as it is written, if there is one of that name."""
    file = _FOLDER / f"{name}.toml"
    return file.read_text(encoding="utf-8") if file.is_file() else None
