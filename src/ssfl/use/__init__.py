"""Using what was learned: take an encoder away, turn images into features, classify with a few
labels."""

from ssfl.use.classify import Classifier, fit_classifier
from ssfl.use.encoders import export_encoder, load_encoder
from ssfl.use.images import embed, find_images, read_images

__all__ = [
    "Classifier",
    "embed",
    "export_encoder",
    "find_images",
    "fit_classifier",
    "load_encoder",
    "read_images",
]
