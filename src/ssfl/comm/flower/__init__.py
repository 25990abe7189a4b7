"""Real federation between sites over Flower: its SuperLink, SuperNodes and `Grid`, not its
strategies.

The coordinator and each site run ssfl as installed there. Flower carries messages; no program
travels: what a site executes is its own copy of ssfl, never code sent by the server.
"""
