"""A small serving engine over kvpool's pools: scheduler, sampling, and attention with PyTorch alone."""

from kvpool.serving.engine import Engine, Model, Request
from kvpool.serving.held import Held
from kvpool.serving.moves import Move
from kvpool.serving.options import SchedulerOptions
from kvpool.serving.pool_calls import PoolCalls
from kvpool.serving.sampling import Sampling
from kvpool.serving.schedulable import Schedulable, State, Tokens
from kvpool.serving.scheduler import Scheduler
from kvpool.serving.step import Step
from kvpool.serving.swap import SwapMode

__all__ = [
    "Engine",
    "Held",
    "Model",
    "Move",
    "PoolCalls",
    "Request",
    "Sampling",
    "Schedulable",
    "Scheduler",
    "SchedulerOptions",
    "State",
    "Step",
    "SwapMode",
    "Tokens",
]
