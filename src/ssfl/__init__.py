"""SSFL: federated self-supervised learning with personalised encoders.

    import ssfl
    run = ssfl.train("demo")
    encoder = run.global_encoder()

Names are imported on first use, so that `import ssfl` and `ssfl --help` stay quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssfl.config import Config, load_config
    from ssfl.encoder import Encoder
    from ssfl.experiment import resume, train
    from ssfl.protocols.judge import evaluate
    from ssfl.report import write_comparison, write_report
    from ssfl.run import Run
    from ssfl.use import load_encoder

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Encoder",
    "Run",
    "evaluate",
    "load_config",
    "load_encoder",
    "resume",
    "train",
    "write_comparison",
    "write_report",
]

_HOMES = {
    "Config": "ssfl.config",
    "Encoder": "ssfl.encoder",
    "Run": "ssfl.run",
    "evaluate": "ssfl.protocols.judge",
    "load_config": "ssfl.config",
    "load_encoder": "ssfl.use",
    "resume": "ssfl.experiment",
    "train": "ssfl.experiment",
    "write_comparison": "ssfl.report",
    "write_report": "ssfl.report",
}


if not TYPE_CHECKING:  # to which a module with this function has whatever name is asked for

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'ssfl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
