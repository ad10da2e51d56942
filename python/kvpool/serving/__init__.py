"""A small serving engine over kvpool's pools: scheduler, sampling, and attention with PyTorch alone."""

from kvpool.serving.engine import Engine, Model, Request
from kvpool.serving.held import Held
from kvpool.serving.sampling import Sampling
from kvpool.serving.schedulable import Schedulable
from kvpool.serving.scheduler import Scheduler
from kvpool.serving.step import Step

__all__ = ["Engine", "Held", "Model", "Request", "Sampling", "Schedulable", "Scheduler", "Step"]
