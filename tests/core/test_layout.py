"""The layout of the flat vector: learnable parameters, then float buffers, then counters."""

import numpy as np
import pytest
from torch import nn

from freshet.core.layout import Layout
from freshet.errors import ConfigError
from freshet.training.network import FlatModel, layout_of


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def test_order_is_learnable_then_buffers_then_counters_each_in_registration_order():
    layout = layout_of(batch_norm_net())
    assert [(e.name, e.kind, e.shape) for e in layout.entries] == [
        ("0.weight", "learnable", (2, 1, 3, 3)),
        ("0.bias", "learnable", (2,)),
        ("1.weight", "learnable", (2,)),
        ("1.bias", "learnable", (2,)),
        ("3.weight", "learnable", (3, 8)),
        ("3.bias", "learnable", (3,)),
        ("1.running_mean", "buffer", (2,)),
        ("1.running_var", "buffer", (2,)),
        ("1.num_batches_tracked", "counter", ()),
    ]
    assert (layout.learnable, layout.floats, layout.size) == (18 + 2 + 2 + 2 + 24 + 3, 55, 56)


def test_spans_tile_the_vector_without_gap_or_overlap():
    layout = layout_of(batch_norm_net())
    covered = [place for e in layout.entries for place in range(layout.size)[e.span]]
    assert covered == list(range(layout.size))
    assert all(e.size == int(np.prod(e.shape)) for e in layout.entries)


def test_groups_are_layers_and_cover_every_learnable_value_once():
    layout = layout_of(batch_norm_net())
    covered = sorted(place for group in layout.groups for start, stop in group for place in range(start, stop))
    assert covered == list(range(layout.learnable))
    first = layout.groups[0]
    assert first[0] == (0, 18)
    assert first[1] == (18, 20)


def test_without_groups_every_tensor_is_its_own():
    layout = Layout.build([("a", (2,), "learnable"), ("c", (), "counter"), ("b", (3,), "learnable")])
    assert layout.groups == (((0, 2),), ((2, 5),))


def test_without_buffers_floats_end_where_learnable_ends():
    layout = Layout.build([("a", (2, 2), "learnable"), ("n", (), "counter")])
    assert (layout.learnable, layout.floats, layout.size) == (4, 4, 5)


def test_max_counters_sets_the_counters_and_nothing_else():
    layout = Layout.build([("a", (2,), "learnable"), ("b", (1,), "buffer"), ("n", (), "counter")])
    out = np.array([1, 2, 3, 4], np.float32)
    layout.max_counters(out, np.array([9, 9, 9, 7], np.float32), np.array([9, 9, 9, 12], np.float32))
    np.testing.assert_array_equal(out, [1, 2, 3, 12])


def test_a_flat_model_and_its_module_show_the_same_weights():
    flat = FlatModel(batch_norm_net())
    w = np.arange(flat.layout.size, dtype=np.float32)
    flat.load(w)
    state = flat.module.state_dict()
    for e in flat.layout.entries:
        np.testing.assert_array_equal(state[e.name].numpy().reshape(-1), w[e.span])
    np.testing.assert_array_equal(flat.dump(), w)


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="no parameters"):
        layout_of(nn.Flatten())
