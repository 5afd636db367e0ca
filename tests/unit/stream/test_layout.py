"""Which layers travel over which transport, between workers that split a model in different ways."""

from __future__ import annotations

import pytest
from support.streams import pair, split

import pykvgraph as kvg
from pykvgraph.stream import Layout, crossings

DEPTHS = [1, 2, 3, 5]


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("q", DEPTHS)
def test_each_layer_crosses_once_between_the_workers_that_have_it(p: int, q: int) -> None:
    source, target = split(12, p), split(12, q)
    found = crossings(source, target)
    for layer in range(12):
        over = [pair_of for pair_of, layers in found.items() if layer in layers]
        assert len(over) == 1
        i, j = over[0]
        assert layer in source[i]
        assert layer in target[j]
    assert all(len(layers) > 0 for layers in found.values())
    assert len(found) <= p + q - 1


def test_layers_of_a_layout() -> None:
    (one, _), (other, _) = pair(), pair()
    layout = Layout({one: range(0, 6, 2), other: (5, 3, 1)})
    assert layout.parts == ((one, (0, 2, 4)), (other, (1, 3, 5)))
    assert layout.layers == set(range(6))


def test_a_layer_travels_over_one_transport() -> None:
    (one, _), (other, _) = pair(), pair()
    with pytest.raises(kvg.InvalidArgumentError, match="layer 5 is there twice"):
        Layout({one: range(6), other: range(5, 8)})


@pytest.mark.parametrize("layers", [[-1], ["0"], [1.5]])
def test_what_is_no_layer(layers: list[object]) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        Layout({pair()[0]: layers})  # type: ignore[dict-item]


@pytest.mark.parametrize("parts", [{}, None, {"memory:x": range(2)}])
def test_what_is_no_layout(parts: object) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        Layout(parts)  # type: ignore[arg-type]
