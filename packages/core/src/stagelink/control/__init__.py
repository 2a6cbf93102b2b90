"""The control plane: how ranks meet, who reads, what every frame means, how failures spread."""
