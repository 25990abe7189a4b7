"""SSL methods by name: one file and one line each."""

from ssfl.registry import Registry

METHODS = Registry(
    "SSL method",
    {
        "simsiam": "ssfl.ssl.simsiam:SimSiam",
        "simclr": "ssfl.ssl.simclr:SimCLR",
        "byol": "ssfl.ssl.byol:BYOL",
        "swav": "ssfl.ssl.swav:SwAV",
        "moco": "ssfl.ssl.moco:MoCo",
        "barlow-twins": "ssfl.ssl.barlow_twins:BarlowTwins",
        "vicreg": "ssfl.ssl.vicreg:VICReg",
        "supervised": "ssfl.ssl.supervised:Supervised",
    },
)
