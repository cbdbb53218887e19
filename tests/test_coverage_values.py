"""Every spelling of the pattern coverage that is fused, run: the rewritten graph against the one it came from, on random values."""

from __future__ import annotations

import pytest
import spellings_conv_gelu_pool
import spellings_conv_norm_pool_gelu
import torch
from models import fuse
from reference import relative_error
from spellings import Row
from torch import fx

from fxfuse import library
from fxfuse.values import value_of

pytestmark = pytest.mark.compiler

ROWS = [row for module in (spellings_conv_norm_pool_gelu, spellings_conv_gelu_pool) for row in module.ROWS if not row.declined]
# Two ways to compute the same, each rounding at several places on the way: in the coarsest dtype that the graph holds.
ROUNDINGS = 8


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.chain}-{row.name}")
def test_values(row: Row) -> None:
    gm = row.graph()
    values = [value for value in map(value_of, gm.graph.nodes) if isinstance(value, torch.Tensor)]
    if any(value.device.type != "cpu" for value in values):
        pytest.skip("the row is of a GPU's tensors")
    library.load("cpu")
    with row.around():
        graph, report = fuse(gm)
        assert report.fused
        rewritten = fx.GraphModule(gm, graph)
        given, again = random_inputs(gm.graph), random_inputs(gm.graph)
        try:
            expected = torch.utils._pytree.tree_leaves(gm(*given))
        except NotImplementedError as error:
            pytest.skip(f"eager: {error}")
        results = torch.utils._pytree.tree_leaves(rewritten(*again))
    bound = ROUNDINGS * max(torch.finfo(value.dtype).eps for value in values if value.is_floating_point())
    for result, right in zip([*results, *again], [*expected, *given], strict=True):
        assert (result.dtype, result.shape, result.stride()) == (right.dtype, right.shape, right.stride())
        if result.numel():
            assert relative_error(result, right.double()) <= bound, row.name


def random_inputs(graph: fx.Graph) -> list[torch.Tensor]:
    """Real tensors as the placeholders' example values, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in graph.find_nodes(op="placeholder"):
        value = value_of(node)
        memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        inputs.append(memory.copy_(torch.randn(value.shape, generator=generator)))
    return inputs
