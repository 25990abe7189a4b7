"""Networks: backbones, heads, norms, and a model as one flat vector."""
