"""Real federation between sites over Flower: its SuperLink, SuperNodes and `Grid`, not its
strategies.

The coordinator and each site run ssfl as installed there. Flower carries messages; no program
travels: what a site executes is its own copy of ssfl, never code sent by the server.
"""

import os

QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
"""Flower neither installs anything, nor reports home, nor looks for updates."""

os.environ.update(QUIET)  # Flower reads them when it is imported, which only this package does
