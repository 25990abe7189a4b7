"""A site's part of a federation: its own clients, under the ids they have in the whole.

Their images lie in a folder of the site's. Without one they are the recipe's: a rehearsal.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from ssfl.data.decode import Window
from ssfl.data.federated import FederatedData, federate
from ssfl.data.partition import PartitionOptions
from ssfl.data.sources import load_dataset
from ssfl.data.sources.folder import FolderOptions
from ssfl.data.sources.sites import SitesOptions
from ssfl.errors import ConfigError
from ssfl.section import Section


class HereOptions(Section):
    """Which of a federation's clients are here."""

    clients: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Ids of the clients that live here, as agreed with the coordinator."""
    data: Path | None = None
    """Folder of this site's images, with a subfolder per client (in the order of their names)
    where there are several. Without one, the recipe's own data are used: a rehearsal."""
    window: Window | None = None
    """The values that are black and white in its grey files of more than 8 bits (not set: as the
    recipe has it). Scanners differ, so sites may."""

    @field_validator("clients")
    @classmethod
    def _all_different(cls, clients: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(clients)) < len(clients):
            raise ValueError("a client is named twice")
        return clients


def load_here(
    here: HereOptions,
    recipe: Section,
    partition: PartitionOptions,
    seed: int,
    *,
    progress: bool = False,
) -> FederatedData:
    """The images of the clients here. `recipe` is the data that the whole federation agreed on."""
    if here.data is None:
        if here.window is not None:
            raise ConfigError(
                "a window is for this site's own images: give them with --data, or take window "
                "out of site.toml"
            )
        whole = federate(load_dataset(recipe, seed=seed, progress=progress), partition, seed)
        return _rehearsing(here.clients, whole)
    if not here.data.is_dir():
        raise ConfigError(f"there is no folder {here.data}: give the images' with --data")
    several = len(here.clients) > 1
    dataset = load_dataset(_on_folder(recipe, here, several), seed=seed, progress=progress)
    if isinstance(recipe, SitesOptions):  # what it fixes for all sites
        dataset = replace(dataset, mean=recipe.mean, std=recipe.std, presets=recipe.preset)
    own = PartitionOptions(kind="natural" if several else "iid", clients=1)
    local = federate(dataset, own, seed)
    if len(local) != len(here.clients):
        raise ConfigError(
            f"{here.data} has images of {len(local)} clients (a subfolder each), "
            f"but {len(here.clients)} live here according to site.toml"
            + "".join(f"; {note}" for note in local.dataset.notes)
        )
    return replace(local, ids=here.clients)


def _rehearsing(clients: tuple[int, ...], whole: FederatedData) -> FederatedData:
    """Some clients of a federation whose images are all at hand."""
    if len(whole) == 0:
        raise ConfigError("the recipe's images are at sites: give this site's with --data")
    if max(clients) >= len(whole):
        raise ConfigError(f"the recipe has clients 0 to {len(whole) - 1}, not {max(clients)}")
    train, test, names = whole.train_parts, whole.test_parts, whole.names
    return FederatedData(
        whole.dataset,
        [train[k] for k in clients],
        None if test is None else [test[k] for k in clients],
        None if names is None else tuple(names[k] for k in clients),
        ids=clients,
    )


def _on_folder(recipe: Section, here: HereOptions, several: bool) -> FolderOptions:
    """This site's images, brought to the recipe's size: a subfolder for each of several clients."""
    assert here.data is not None
    if isinstance(recipe, FolderOptions):
        agreed = recipe
    else:
        agreed = FolderOptions(image_size=getattr(recipe, "image_size", 32))
    own: dict[str, object] = {"path": here.data.resolve()}
    own["layout"] = "clients" if several else "flat"
    if here.window is not None:
        own["window"] = here.window
    return agreed.model_copy(update=own)
