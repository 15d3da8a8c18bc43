"""Templates: text as literals and slots, the one description that host and device both read.

A `Template` is a sequence of parts. A `Literal` is fixed text. A `Slot` is a choice out of a finite
vocabulary of strings (a grid row, a number, a name), so an observation is a short vector of slot
indices, and its text can be assembled on the device by table look-up.

Rules that keep the joins between parts safe for byte-level BPE tokenizers: a leading space belongs to
the slot, a trailing newline to the row that it ends; the part after a part that ends in whitespace
never starts with whitespace, no part ends in two whitespace characters; no combining marks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Literal:
    """Fixed text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Slot:
    """A choice out of `values`; an index into them is what an environment observes."""

    name: str
    values: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Template:
    """Literals and slots in order."""

    parts: tuple[Literal | Slot, ...]

    @classmethod
    def of(cls, *parts: str | Slot) -> Template:
        """Build a template; plain strings become literals and adjacent ones are joined."""
        joined: list[Literal | Slot] = []
        for part in parts:
            if isinstance(part, str):
                if not part:
                    continue
                if joined and isinstance(joined[-1], Literal):
                    joined[-1] = Literal(joined[-1].text + part)
                else:
                    joined.append(Literal(part))
            else:
                joined.append(part)
        return cls(tuple(joined))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots in order; `render_text` and the device take one index for each."""
        return tuple(part for part in self.parts if isinstance(part, Slot))

    def __add__(self, other: Template) -> Template:
        parts: list[str | Slot] = [
            p.text if isinstance(p, Literal) else p for p in (*self.parts, *other.parts)
        ]
        return Template.of(*parts)

    def render_text(self, indices: Sequence[int]) -> str:
        """The text for one index per slot. Raises ValueError if the count or an index is off."""
        if len(indices) != len(self.slots):
            raise ValueError(f"template has {len(self.slots)} slots, got {len(indices)} indices")
        remaining = iter(indices)
        pieces = []
        for part in self.parts:
            if isinstance(part, Literal):
                pieces.append(part.text)
                continue
            index = int(next(remaining))
            if not 0 <= index < len(part.values):
                raise ValueError(f"slot {part.name!r}: index {index} is not in 0..{len(part.values) - 1}")
            pieces.append(part.values[index])
        return "".join(pieces)
