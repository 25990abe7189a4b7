"""Train the demo federation, then use its encoder with a handful of labels.

python examples/train_demo.py [section.key=value ...]
"""

import sys

from rich.console import Console

import ssfl
from ssfl.assemble import load_federated
from ssfl.display import Bars
from ssfl.use import embed, fit_classifier

LABELS = 200

config = ssfl.load_config("demo", sys.argv[1:])
run = ssfl.train(config, display=Bars(Console()))  # without a display, it trains in silence
print(f"trained {config.server.rounds} rounds; all of it is in {run.path}")

# An encoder is an ordinary nn.Module: images in, features out.
encoder = run.global_encoder()
images = load_federated(config).dataset.test
assert images is not None
assert images.labels is not None
features = embed(encoder, images.pixels)
print(f"{len(features)} test images became features of width {features.shape[1]}")

# A classifier from the first few labels, tried on the rest.
labels = [str(label) for label in images.labels.tolist()]
few = min(LABELS, len(labels) // 2)
classifier = fit_classifier(features[:few], labels[:few])
guesses = classifier.probabilities(features[few:]).argmax(1).tolist()
right = sum(classifier.classes[g] == truth for g, truth in zip(guesses, labels[few:], strict=True))
print(f"with {few} labels, {right} of {len(guesses)} other images are named correctly")
