"""Train on a folder of your own images, without a label, and look for similar ones.

python examples/own_images.py FOLDER [section.key=value ...]

With images straight in FOLDER, they are dealt to five clients at random; with a subfolder per
client, each client holds its own.
"""

import sys
from pathlib import Path

import torch

import ssfl
from ssfl.use import embed, export_encoder, find_images

if len(sys.argv) < 2 or not (folder := Path(sys.argv[1])).is_dir():
    raise SystemExit("give a folder of images: python examples/own_images.py FOLDER")
files = find_images(folder)
by_client = all(file.parent != folder for file in files)
config = ssfl.load_config(
    "demo",  # a small network and a short run to begin with
    [
        "name=own-images",
        "data.source=folder",
        f"data.path={folder.resolve()}",
        f"data.layout={'clients' if by_client else 'flat'}",
        "data.image_size=32",
        f"partition.kind={'natural' if by_client else 'iid'}",
        "partition.clients=5",
        "partition.min_size=2",
        "evaluation.baselines=false",
        *sys.argv[2:],
    ],
)
run = ssfl.train(config)

# No labels, so no accuracy. These two say whether the encoder has collapsed.
final = run.final
print(f"feature spread {final['std_ratio']:.2f} (near 0: collapsed)")
print(f"effective rank {final['effective_rank']:.1f}")

encoder = run.global_encoder()
broken: list[Path] = []  # files that cannot be read are left out, as in training
features = torch.nn.functional.normalize(embed(encoder, files, broken=broken), dim=1)
names = [str(file.relative_to(folder)) for file in files if file not in broken]
nearest = (features @ features[0]).argsort(descending=True)
print("most like", names[0], "are", ", ".join(names[i] for i in nearest[1:4].tolist()))

print("encoder saved as", export_encoder(run, run.path / "encoder.safetensors"))
