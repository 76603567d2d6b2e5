"""The report's pictures, as HTML that needs no script: grids of coloured cells with a layer in each
row, and bars. Coloured cells have a text colour of their own, so both read on any background."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_OF_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_LEAST, _MOST = (255, 243, 214), (140, 20, 32)  # red, green, blue: of losses, from pale to dark
_WHITE_TEXT_FROM = 0.675  # of the way from least to most, where black stands out no better


@dataclass(frozen=True)
class Cell:
    """text: what it shows; title: what it says when pointed at; colour: an attribute that gives it
    one, from `LogScale.colour` or `bits_colour`."""

    text: str
    title: str
    colour: str = ""

    def html(self, span: int = 1) -> str:
        attributes = f' title="{escape(self.title)}"' + (f' colspan="{span}"' if span > 1 else "")
        return f"<td{attributes}{self.colour}>{escape(self.text)}</td>"


@dataclass(frozen=True)
class LogScale:
    """Colours of positive numbers between two powers of ten, darker the larger."""

    lowest: int
    highest: int

    @classmethod
    def of(cls, numbers: Iterable[float]) -> "LogScale | None":
        """Of the decades that these lie in; None if none is positive."""
        logs = [math.log10(number) for number in numbers if number > 0]
        if not logs:
            return None
        lowest = math.floor(min(logs))
        return cls(lowest, max(lowest + 1, math.ceil(max(logs))))

    def colour(self, number: float) -> str:
        """As an attribute; of 0, white."""
        if number <= 0:
            return _coloured((255, 255, 255), "#000")
        way = (math.log10(number) - self.lowest) / (self.highest - self.lowest)
        way = min(max(way, 0.0), 1.0)
        parts = (round(a + way * (b - a)) for a, b in zip(_LEAST, _MOST, strict=True))
        return _coloured(tuple(parts), "#fff" if way >= _WHITE_TEXT_FROM else "#000")

    def legend(self) -> str:
        """A row of its powers of ten."""
        powers = (10.0**power for power in range(self.lowest, self.highest + 1))
        cells = "".join(f"<td{self.colour(power)}>{power:.0e}</td>" for power in powers)
        return f'<table class="grid"><tr><th>least</th>{cells}<th>most</th></tr></table>'


def bits_colour(bits: int) -> str:
    """The attribute that colours a precision by its bits: 4, 8, 16 or 32."""
    return f' class="b{bits}"'


def layer_grid(cells: Mapping[str, Cell]) -> str:
    """A table of cells by name: layers.N.COLUMN stands in layer N's row, any other in its own."""
    rows: dict[int, dict[str, Cell]] = {}
    alone: dict[str, Cell] = {}
    for name, cell in cells.items():
        found = _OF_LAYER.fullmatch(name)
        if found is None:
            alone[name] = cell
        else:
            rows.setdefault(int(found[1]), {})[found[2]] = cell
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [
        f"<tr><th>layer {layer}</th>"
        + "".join(row[column].html() if column in row else "<td></td>" for column in columns)
        + "</tr>"
        for layer, row in sorted(rows.items())
    ]
    lines += [
        f"<tr><th>{escape(_short(name))}</th>{cell.html(len(columns))}</tr>"
        for name, cell in alone.items()
    ]
    head = "".join(f"<th>{escape(_short(column))}</th>" for column in columns)
    return f'<table class="grid"><tr><th></th>{head}</tr>{"".join(lines)}</table>'


def bars(rows: Sequence[tuple[str, float, str, str]]) -> str:
    """Bars as long as their numbers, the longest the whole width. rows: a label, the number, how to
    write it, and the bar's class."""
    longest = max(number for _, number, _, _ in rows) or 1
    lines = (
        f'<tr><th>{escape(label)}</th><td class="track"><div class="bar {kind}" '
        f'style="width:{100 * number / longest:.1f}%"></div></td><td>{escape(text)}</td></tr>'
        for label, number, text, kind in rows
    )
    return f'<table class="bars">{"".join(lines)}</table>'


def _coloured(background: tuple[int, ...], text: str) -> str:
    return f' style="background:#{bytes(background).hex()};color:{text}"'


def _short(name: str) -> str:
    """attention.q_proj.weight as q."""
    name = name.removesuffix(".weight").removeprefix("attention.").removeprefix("mlp.")
    return name.removesuffix("_proj")
