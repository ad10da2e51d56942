"""The first wrong byte of a layout, in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """What the bytes of an entry follow from.

    Attributes:
        prefix: Number of the request that has computed it.
        position: The first token that it stands for; of a state, the number of tokens.
        layer: Layer of the model.
        group: Name of the group.
        plane: Name of the plane.
        part: The part of the bytes that the rank has.
        is_state: Whether it is a state.
    """

    prefix: int
    position: int
    layer: int
    group: str
    plane: str
    part: int = 0
    is_state: bool = False

    def owner(self) -> str:
        """Return what of which request it is."""
        if self.is_state:
            return f"the state of request {self.prefix} after {self.position} tokens"
        return f"position {self.position} of request {self.prefix}"

    def array(self, *, names_group: bool) -> str:
        """Return layer and plane, and the group if several have a plane of that name."""
        return f"layer {self.layer}, {self.plane}{f' of {self.group}' if names_group else ''}"


@dataclass(frozen=True)
class Finding:
    """A wrong byte: where it is, what it should be, and what is there. `str` gives one line.

    Attributes:
        request: The request that reads it.
        page: Which page of the request; None for a state.
        byte: Byte of the page, or of the state, in the plane of the layer.
        should_be: The entry that belongs there.
        holds: The entry that is there, if it is one.
        holds_byte: The byte of that entry which is there, if it is another than that of `should_be`.
        note: What is there if it is no entry, but known.
        found: The first bytes that are there, from the wrong one on.
        wrong_entries: Entries of the page that are wrong.
        page_entries: Entries of the page that were compared.
        names_group: Whether planes of several groups have this name.
        was_dropped: Whether no request has the entry any more that is there.
    """

    request: int
    page: int | None
    byte: int
    should_be: Entry
    holds: Entry | None = None
    holds_byte: int | None = None
    note: str = ""
    found: bytes = b""
    wrong_entries: int = 1
    page_entries: int = 1
    names_group: bool = False
    was_dropped: bool = False

    @property
    def where(self) -> str:
        """The place of the byte, with what belongs there."""
        place = self.should_be.array(names_group=self.names_group)
        own = self.should_be
        if self.page is None:
            whose = "" if own.prefix == self.request else f", computed by request {own.prefix}"
            state = f"state of request {self.request} after {own.position} tokens{whose}"
            return f"{state}, {place}, byte {self.byte}"
        belongs = f"position {own.position}"
        if own.prefix != self.request:
            belongs = own.owner()
        return f"page {self.page} of request {self.request}, {place}, byte {self.byte} ({belongs})"

    @property
    def what(self) -> str:
        """What is there."""
        if self.holds is None:
            return self.note or f"holds {self.found.hex(' ')}, which are bytes of no entry"
        other = self.holds
        byte = "" if self.holds_byte is None else f"byte {self.holds_byte} of "
        part = "" if other.part == self.should_be.part else f", of part {other.part}"
        dropped = ", which was dropped" if self.was_dropped else ""
        return f"holds {byte}{other.owner()}, {other.array(names_group=self.names_group)}{part}{dropped}"

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}"
        if self.wrong_entries < self.page_entries:
            line += f"; {self.wrong_entries} of the page's {self.page_entries} entries are wrong"
        return line

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values, with the line."""
        plain = asdict(self)
        plain["should_be"] = self.should_be._asdict()
        plain["holds"] = None if self.holds is None else self.holds._asdict()
        plain["found"] = self.found.hex()
        return {"text": str(self), **plain}
