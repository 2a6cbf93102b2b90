"""Faces that others know: torch.distributed's process groups, PipeDream's names."""
