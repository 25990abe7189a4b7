"""Every knob, once: gathered from the rooms that use them, validated, with TOML in and out.

A configuration starts from a recipe or a TOML file, takes `section.key=value` settings on top, and
is written in full beside the results it led to.
"""

from ssfl.config.load import load_config, parse, read_own, with_whole_paths
from ssfl.config.schema import CHOICES, LETTERS, Config, fits_a_folder
from ssfl.config.settings import apply_setting
from ssfl.config.toml import to_toml
from ssfl.section import validated

__all__ = [
    "CHOICES",
    "LETTERS",
    "Config",
    "apply_setting",
    "fits_a_folder",
    "load_config",
    "parse",
    "read_own",
    "to_toml",
    "validated",
    "with_whole_paths",
]
