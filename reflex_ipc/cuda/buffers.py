"""Where values lie while a step runs: a value's room is given to others once nothing reads it any more.

Rooms are counted in columns, so that they hold for any number of rows: a value of width w with n rows takes w * n
numbers from its column times the rows there is room for.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from reflex_ipc.cuda.fuse import Group

STEP = 64
"""Columns begin at multiples of this, so that every value is aligned to 256 bytes whatever the rows."""


class Columns:
    """`start[name]` is the first column of each value; `width` and `selected_width` the columns of all, for values with
    a row a token and for those with a row that wants logits."""

    def __init__(self, groups: "Sequence[Group]", last: str) -> None:
        self.start: dict[str, int] = {}
        self.width = self.selected_width = 0
        last_read = {value.name: i for i, group in enumerate(groups) for value in group.inputs}
        last_read[last] = len(groups)
        alive: dict[bool, list[tuple[int, int, str]]] = {False: [], True: []}
        for i, group in enumerate(groups):
            for value in group.outputs:
                rooms = alive[value.selected]
                columns = -(-value.width // STEP) * STEP
                at = 0
                for start, size, _ in sorted(rooms):
                    if start - at >= columns:
                        break
                    at = max(at, start + size)
                self.start[value.name] = at
                rooms.append((at, columns, value.name))
                if value.selected:
                    self.selected_width = max(self.selected_width, at + columns)
                else:
                    self.width = max(self.width, at + columns)
            for rooms in alive.values():
                rooms[:] = [room for room in rooms if last_read.get(room[2], i) > i]
