"""A proof of a layout's bytes: every entry tells what it is, whatever has moved it.

```python
from kvpool.verify import make_driver, prove

with make_driver("host-tier", layout) as driver:
    proof = prove(driver)
assert proof.finding is None, proof.finding
```

A driver of your own is a subclass of `Driver`. `Pattern` writes and checks buffers without one. Needs NumPy.
"""

from __future__ import annotations

from kvpool.verify.driver import Driver, LeftOutError, Proof, prove
from kvpool.verify.drivers import DRIVERS, make_driver
from kvpool.verify.finding import Entry, Finding
from kvpool.verify.pattern import FREED, Array, Pattern
from kvpool.verify.requests import Request, Workload

__all__ = [
    "DRIVERS",
    "FREED",
    "Array",
    "Driver",
    "Entry",
    "Finding",
    "LeftOutError",
    "Pattern",
    "Proof",
    "Request",
    "Workload",
    "make_driver",
    "prove",
]
