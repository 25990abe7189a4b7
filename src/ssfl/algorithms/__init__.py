"""Algorithms by name: one file and one line each."""

from ssfl.registry import Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "global-ssfl": "ssfl.algorithms.global_ssfl:GlobalSSFL",
        "per-ssfl": "ssfl.algorithms.per_ssfl:PerSSFL",
        "la-ssfl": "ssfl.algorithms.la_ssfl:LASSFL",
        "maml-ssfl": "ssfl.algorithms.maml_ssfl:MAMLSSFL",
        "bilevel-ssfl": "ssfl.algorithms.bilevel_ssfl:BiLevelSSFL",
        "local-only": "ssfl.algorithms.local_only:LocalOnly",
        "fedu": "ssfl.algorithms.fedu:FedU",
        "fedema": "ssfl.algorithms.fedema:FedEMA",
    },
)
