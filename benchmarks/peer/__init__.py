"""The same federated work in ssfl, in Flower's simulation and in pfl-research, for peers.py."""
