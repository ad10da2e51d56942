"""The public path of `kvpool.serving.sampling`."""

from kvpool.serving.sampling import Sampling, sample

__all__ = ["Sampling", "sample"]
