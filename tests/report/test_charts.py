"""Drawings, read as XML: every mark is where its value belongs, and says what it is.

Coordinates are worked out by hand for a frame from 44 to 348 across and from 184 up to 10.
"""

import itertools
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from ssfl.report import parts
from ssfl.report.charts import Series, columns_chart, line_chart, matrix, percent, scatter

ODD = 'a <b> & "c"'


def read(drawing: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawing)


def texts(drawing: ElementTree.Element) -> dict[str, tuple[float, float]]:
    return {one.text or "": (float(one.get("x", "")), float(one.get("y", "")))
            for one in drawing.iter("text")}  # fmt: skip


def marks(drawing: ElementTree.Element, tag: str, *keys: str) -> dict[str, tuple[float, ...]]:
    """Numbers of the drawing's marks, by what hovering over them says."""
    return {
        one.findtext("title", ""): tuple(float(one.get(key, "")) for key in keys)
        for one in drawing.iter(tag)
        if "mark" in one.get("class", "")
    }


def test_a_line_goes_through_its_points_and_the_axes_say_where_they_are() -> None:
    line = Series("it", [(1, 0), (3, 10), (5, 4)], 0)
    drawing = read(line_chart([line], "it"))
    assert marks(drawing, "circle", "cx", "cy") == {
        "it, round 1: 0": (44, 184),
        "it, round 3: 10": (196, 10),
        "it, round 5: 4": (348, 114.4),
    }
    (path,) = (p.get("d") for p in drawing.iter("path") if p.get("class") != "grid")
    assert path == "M44.0 184.0L196.0 10.0L348.0 114.4"
    named = texts(drawing)
    heights = {"0": 187.5, "8": 48.3, "10": 13.5}  # the middle of the letters is at the line
    assert {name: named[name] for name in heights} == {n: (38, y) for n, y in heights.items()}
    rounds = {"1": 44, "3": 196, "5": 348}
    assert {name: named[name] for name in rounds} == {n: (x, 202) for n, x in rounds.items()}
    lines = [p.get("d") for p in drawing.iter("path") if p.get("class") == "grid"]
    assert lines == [f"M44 {y}H348" for y in (184.0, 149.2, 114.4, 79.6, 44.8, 10.0)]


def test_references_are_at_their_own_heights_and_inside_the_frame() -> None:
    """Values need not end at a tick: from 0.7 to 9.6 there are 2, 4, 6 and 8."""
    series = [
        Series("it", [(2, 0.7), (4, 5.15)], 0),
        Series("raw", [(0, 9.6)], 5, reference=True),
        Series("before", [(0, 2.48)], 7, reference=True),
    ]
    drawing = read(line_chart(series, "it"))
    assert marks(drawing, "circle", "cx", "cy") == {
        "it, round 2: 0.7": (44, 184),
        "it, round 4: 5.15": (348, 97),
    }
    levels = {
        p.findtext("title"): p.get("d") for p in drawing.iter("path") if p.get("class") == "mark"
    }
    assert levels == {"raw: 9.6": "M44 10.0H348", "before: 2.48": "M44 149.2H348"}


def test_of_a_long_line_the_first_and_the_last_point_are_drawn() -> None:
    points = [(x, x % 7) for x in range(1, 2001)]
    found = marks(read(line_chart([Series("it", points, 0)], "it")), "circle", "cx", "cy")
    rounds = [int(name.split()[2].rstrip(":")) for name in found]
    assert len(rounds) == 240
    assert (rounds[0], rounds[-1]) == (1, 2000)
    gaps = {b - a for a, b in itertools.pairwise(rounds)}
    assert gaps <= {8, 9}
    assert all(name.endswith(f": {x % 7}") for name, x in zip(found, rounds, strict=True))


def test_a_column_is_as_high_as_its_value_and_stands_over_its_name() -> None:
    drawing = read(columns_chart([0.1, 0.4, 0.2], ["7", "3", "5"], "it", number=percent))
    third = (348 - 44) / 3
    assert marks(drawing, "rect", "x", "y", "height") == {
        "7: 10.0 %": (45, 140.5, 43.5),
        "3: 40.0 %": (pytest.approx(45 + third, abs=0.05), 10, 174),
        "5: 20.0 %": (pytest.approx(45 + 2 * third, abs=0.05), 97, 87),
    }
    named = texts(drawing)
    for place, name in enumerate("735"):
        assert named[name] == (pytest.approx(44 + (place + 0.5) * third, abs=0.05), 202)
    assert (named["0 %"][1], named["20 %"][1], named["40 %"][1]) == (187.5, 100.5, 13.5)


def test_a_cell_is_in_the_row_of_its_class_and_the_column_of_its_client() -> None:
    drawing = read(matrix([[0, 1], [4, 0]], ["cat", "dog"], ["0", "6"], "it"))
    # Three letters leave 26 to the left: two columns of 165; rows are no higher than 18.
    assert marks(drawing, "rect", "x", "y") == {
        "client 6, cat: 1 images": (191.5, 4.5),
        "client 0, dog: 4 images": (26.5, 22.5),
    }
    shades = [r.get("style") for r in drawing.iter("rect")]
    assert shades == ["--shade:0.50", "--shade:1.00"]  # the root of a quarter
    assert texts(drawing) == {
        "cat": (20, 16.5),
        "dog": (20, 34.5),
        "0": (108.5, 54),
        "6": (273.5, 54),
    }


def test_names_of_classes_do_not_lie_on_top_of_each_other_however_many_clients_there_are() -> None:
    names = [f"class {i}" for i in range(24)]
    drawing = read(matrix([[1] * 240] * 24, names, [str(k) for k in range(240)], "it"))
    heights = [texts(drawing)[name][1] for name in names]
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 11  # of letters


def test_a_map_keeps_its_proportions_and_every_point_its_group() -> None:
    drawing = read(scatter([(0, 0), (2, 1), (1, 0.5)], [1, 0, 1], ["cat", "dog"], "it"))
    assert drawing.get("viewBox") == "0 0 420 218"
    groups = {
        group.findtext("title"): (
            group.get("class"),
            [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in group.iter("circle")],
        )
        for group in drawing.iter("g")
    }
    assert groups == {"dog": ("c1", [(8, 8), (210, 109)]), "cat": ("c0", [(412, 210)])}


@pytest.mark.parametrize(
    "draw",
    [
        lambda: line_chart([Series(ODD, [(1, 1), (2, 2)], 0)], ODD),
        lambda: line_chart([Series("", [(1, 1)], 0), Series(ODD, [(0, 2)], 1, True)], ODD),
        lambda: columns_chart([1, 2], [ODD, "2"], ODD),
        lambda: matrix([[1]], [ODD], ["0"], ODD),
        lambda: scatter([(0, 0), (1, 1)], [0, 0], [ODD], ODD),
    ],
    ids=["line", "level", "columns", "matrix", "map"],
)
def test_names_in_a_drawing_are_text_and_not_markup(draw: Callable[[], str]) -> None:
    drawing = read(draw())
    assert drawing.get("aria-label") == ODD
    assert any(ODD in (title.text or "") for title in drawing.iter("title"))


def test_bars_are_as_long_as_their_values_and_the_mean_is_a_line_across_them() -> None:
    rows = [("one", "7 images", 1.0, "1.0 s"), (ODD, ODD, 3.0, ODD)]
    table = read(parts.bars(rows, most=4.0, mean=2.0))
    found = [
        (
            *(line.findtext(f".//{tag}") or "" for tag in ("th", "small")),
            *(line.find(f".//{tag}").get("style") for tag in ("i", "b")),  # type: ignore[union-attr]
            line.findtext("td[@class='n']"),
        )
        for line in table.iter("tr")
    ]
    assert found == [
        ("one", "7 images", "width:25.00%", "left:50.00%", "1.0 s"),
        (ODD, ODD, "width:75.00%", "left:50.00%", ODD),
    ]


def test_one_bar_is_cut_in_proportion() -> None:
    cut = read(parts.shares([("one", 1.0, "1 s"), (ODD, 3.0, "3 s"), ("none", 0.0, "0 s")]))
    assert [(part.get("title"), part.get("class"), part.get("style")) for part in cut] == [
        ("one: 1 s", "mark c0", "width:25.00%"),
        (f"{ODD}: 3 s", "mark c1", "width:75.00%"),
    ]
