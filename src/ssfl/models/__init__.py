"""Networks: backbones, heads, batch norm, and a model as one flat vector."""
