"""What the matcher asks about nodes: which are the same value, how wide they are, and what a lookup reads."""

import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from vllm_aiter_mla.passes.fx import same_value, width
from vllm_aiter_mla.passes.rope_probe import lookup

aten = torch.ops.aten


class Drawn:
    """A graph of one tensor, and views of it, each drawn twice as Inductor repeats views per reader."""

    def __init__(self):
        self.graph = fx.Graph()
        self.x, self.y = self.graph.placeholder("x"), self.graph.placeholder("y")

    def call(self, target, *args, **kwargs):
        return self.graph.call_function(target, args, kwargs)

    def view(self, of, sizes=(4, -1)):
        return self.call(aten.reshape.default, of, list(sizes))


@pytest.fixture
def drawn():
    return Drawn()


def test_equal_views_of_one_node_are_the_same_value(drawn):
    for of in (drawn.x, drawn.view(drawn.x)):
        assert same_value(drawn.view(of), drawn.view(of))
    pieces = drawn.call(aten.split.Tensor, drawn.x, 2, dim=1), drawn.call(aten.split.Tensor, drawn.x, 2, dim=1)
    assert same_value(*(drawn.call(operator.getitem, one, 1) for one in pieces))
    assert same_value([drawn.x, 2, "a"], (drawn.x, 2, "a"))


def test_what_differs_anywhere_is_another_value(drawn):
    x, y = drawn.x, drawn.y
    view, split = drawn.view(x), lambda **given: drawn.call(aten.split.Tensor, x, 2, **given)
    for other in (
        drawn.view(y), drawn.view(x, (4, 1)), drawn.view(x, (4,)), drawn.view(x, (4, -1, 1)),
        drawn.call(aten.view.default, x, [4, -1]), x, y, 4, None, [x], drawn.call(aten.neg.default, x),
    ):  # fmt: skip
        assert not same_value(view, other)
        assert not same_value(other, view)
    assert not same_value(drawn.call(aten.neg.default, x), drawn.call(aten.neg.default, x)), "a value of its own each"
    assert not same_value(split(dim=1), split(dim=0))
    assert not same_value(split(dim=1), split())
    for a, b in (([x], [x, x]), ([x, 2], [x, 3]), ([x], x), (2, 2.0), (1, True), ((), (x,))):
        assert not same_value(a, b)


@pytest.mark.parametrize(("shape", "wanted"), [((3, 5), 5), ((3,), 3), ((), None), ((2, 3, 7), 7)])
def test_the_width_of_a_node_is_its_last_dimension(drawn, shape, wanted):
    drawn.x.meta["val"] = torch.empty(shape, device="meta")
    drawn.y.meta["val"] = (torch.empty(shape, device="meta"),)
    assert (width(drawn.x), width(drawn.y)) == (wanted, None)


def test_a_last_dimension_that_is_a_symbol_is_no_width(drawn):
    size = ShapeEnv().create_unbacked_symint()
    with FakeTensorMode(shape_env=size.node.shape_env):
        drawn.x.meta["val"] = torch.empty(3, size)
    assert width(drawn.x) is None


def test_a_lookup_takes_rows_of_a_table_and_nothing_else(drawn):
    x, y = drawn.x, drawn.y
    x.meta["val"], y.meta["val"] = torch.empty(9, 4, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    for node in (
        drawn.call(aten.index.Tensor, x, [y]), drawn.call(aten.index_select.default, x, 0, y),
        drawn.call(aten.embedding.default, x, y),
    ):  # fmt: skip
        assert lookup(node) == (x, y)
    for node in (
        drawn.call(aten.index.Tensor, x, [y, y]), drawn.call(aten.index.Tensor, x, [None, y]),
        drawn.call(aten.index_select.default, x, 1, y), drawn.call(aten.embedding.default, y, y),
        drawn.call(aten.embedding.default, x, 3), drawn.call(aten.neg.default, x), x,
    ):  # fmt: skip
        assert lookup(node) is None
