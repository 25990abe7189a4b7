"""Where every random number comes from.

A generator is seeded by (experiment seed, purpose, round, client) and by nothing else. So a run
gives the same numbers with one process or many, in any order of completion, fresh or resumed.
"""

import hashlib

import numpy as np
import torch


def derive(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit seed for one use, from the experiment's seed, what it is for, and where it falls."""
    text = ":".join([str(seed), purpose, *map(str, where)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def torch_generator(
    seed: int, purpose: str, *where: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A torch generator on `device` for one purpose, e.g. ("views", round, client)."""
    generator = torch.Generator(device=device)
    generator.manual_seed(derive(seed, purpose, *where))
    return generator


def numpy_generator(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """A NumPy generator for one purpose, e.g. ("partition",) or ("sample", round)."""
    return np.random.default_rng(derive(seed, purpose, *where))
