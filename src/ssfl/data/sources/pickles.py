"""Reading pickles that hold plain data, without letting them run anything.

A pickle is a program: it may name any function and call it. CIFAR's python layout needs only
NumPy arrays, so the few names that rebuild those are admitted and every other one is refused
before it is imported.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ssfl.errors import DataError

# The two places where NumPy has kept the same function; files in use name either.
ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


class Refused(pickle.UnpicklingError):
    """A pickle named something other than a NumPy array."""


class PlainUnpickler(pickle.Unpickler):
    """Admits numbers, text, bytes, lists, dicts and NumPy arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The few names an array is rebuilt from; any other is refused."""
        if module in ARRAY_MODULES and name == "_reconstruct":
            return _reconstruct
        if module == "numpy" and name == "ndarray":
            return np.ndarray
        if module == "numpy" and name == "dtype":
            return _dtype
        if module == "_codecs" and name == "encode":
            # How protocol 2 writes bytes: the text, then its encoding.
            return _latin1
        raise Refused(f"{module}.{name}")


def load_plain(path: Path) -> Any:
    """What a pickle of plain data holds; keys are text whether Python 2 or 3 wrote them."""
    try:
        with path.open("rb") as file:
            return _text_keys(PlainUnpickler(file, encoding="latin1").load())
    except Refused as error:
        raise DataError(
            f"{path} was not read: it asks for '{error}', and only plain arrays are allowed"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a broken pickle may fail in any way at all
        raise DataError(f"{path} is damaged or not a pickle of plain data: {error}") from error


def _reconstruct(kind: type, shape: Any, typecode: Any) -> np.ndarray[Any, Any]:
    if kind is not np.ndarray or shape != (0,):
        raise Refused(getattr(kind, "__name__", str(kind)))
    return np.ndarray((0,), dtype=np.uint8)


def _dtype(name: Any, *flags: Any) -> np.dtype[Any]:
    if name not in ("u1", "i8", "i4", "f4", "f8"):
        raise Refused(f"numpy.dtype({name!r})")
    kind: np.dtype[Any] = np.dtype(name)
    return kind


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise Refused(f"_codecs.encode to {encoding}")
    return text.encode("latin1")


def _text_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key.decode("latin1") if isinstance(key, bytes) else key: item for key, item in value.items()
    }
