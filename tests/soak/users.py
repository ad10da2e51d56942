"""Random users of pools that others use, too: each knows what it has, and notices when another has it.

What the pools hand out is entered among the owners; what is stored there bears its owner's mark, which is
compared before it is given back. Users also do what they should not, as far as it hurts no one else. They may
run on any number of threads, one user on one at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memory_users import BufferUser, ChunkUser, PageUser, StateUser, WorkspaceUser
from token_users import RequestUser, RowUser, SlotUser

if TYPE_CHECKING:
    from shared_pools import Pools, User

KINDS: tuple[type[User], ...] = (
    *(SlotUser, RowUser, RequestUser, StateUser, ChunkUser, BufferUser, PageUser, WorkspaceUser),
)


def users_of(pools: Pools, number: int, seed: int) -> list[User]:
    """A user of each kind; no two calls for the same pools may have the same `number`."""
    return [kind(pools, number, seed) for kind in KINDS]
