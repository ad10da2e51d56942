"""A small serving engine over kvpool's pools: scheduler, sampling, and attention with PyTorch alone."""

from kvpool_serving.engine import Engine, Model, Request
from kvpool_serving.held import Held
from kvpool_serving.moves import Move
from kvpool_serving.options import SchedulerOptions
from kvpool_serving.pool_calls import PoolCalls
from kvpool_serving.sampling import Sampling
from kvpool_serving.schedulable import Schedulable, State, Tokens
from kvpool_serving.scheduler import Scheduler
from kvpool_serving.step import Step
from kvpool_serving.swap import SwapMode

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
