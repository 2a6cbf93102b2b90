"""Placeholder until the runner lands."""


class PipelineRunner:
    """Soon."""
