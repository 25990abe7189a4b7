"""Run several algorithms on the same data with the same seed, and print one table.

python examples/compare_algorithms.py [section.key=value ...]
"""

import sys

import ssfl

ALGORITHMS = ("global-ssfl", "la-ssfl", "bilevel-ssfl", "per-ssfl", "local-only")

print(f"{'algorithm':14} {'kNN of Θ':>10} {'kNN, mean over clients':>24}")
for name in ALGORITHMS:
    config = ssfl.load_config("demo", [*sys.argv[1:], f"name={name}", f"algorithm.name={name}"])
    final = ssfl.train(config).final
    shared = f"{final['knn_global']:.3f}" if "knn_global" in final else "–"  # alone, there is no Θ
    print(f"{name:14} {shared:>10} {final['knn_mean']:24.3f}")
