"""Tables are exact, shared by whoever comes with the same positions, and gone with them."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fsdp_sink_patches import monitor
from fsdp_sink_patches.ops.rope import apply_rotary, cos_sin, tables

FREQUENCIES = 10000.0 ** -(torch.arange(8) / 8)


@pytest.fixture(autouse=True)
def from_zero() -> Iterator[None]:
    monitor.reset()
    yield
    gc.collect()
    assert not tables._memory.tables, "a test's positions are gone, so are their tables"


def positions(tokens: int = 5, first: int = 0) -> Tensor:
    return torch.arange(first, first + tokens)[None]


def ask(where: Tensor, label: str = "main", frequencies: Tensor = FREQUENCIES) -> tuple[Tensor, Tensor]:
    return tables.remembered(where, label, lambda: cos_sin(where, frequencies))


def test_exact_to_the_rounding_of_the_angle():
    for first in (0, 1000, 70000):
        where = positions(64, first)
        angles = where[..., None].double() * FREQUENCIES.double()
        cos, sin = cos_sin(where, FREQUENCIES, scaling=1.25)
        assert cos.dtype == sin.dtype == torch.float32
        half_an_ulp = (first + 64) * 2.0**-24
        assert (cos.double() / 1.25 - angles.cos()).abs().max() <= half_an_ulp + 2e-7
        assert (sin.double() / 1.25 - angles.sin()).abs().max() <= half_an_ulp + 2e-7


def test_no_setting_of_matrix_products_reaches_the_angles():
    """TF32 rounds a matrix product's inputs to 10 bits; no matrix product, nothing to round."""
    graph = make_fx(lambda p: cos_sin(p, FREQUENCIES))(positions())
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "aten.mul.Tensor" in names
    assert not [name for name in names if "mm" in name or "matmul" in name or "dot" in name]


def test_other_dtypes_are_rounded_from_fp32():
    cos, sin = cos_sin(positions(), FREQUENCIES)
    for dtype in (torch.bfloat16, torch.float64):
        rounded = cos_sin(positions(), FREQUENCIES, dtype=dtype)
        assert torch.equal(rounded[0], cos.to(dtype))
        assert torch.equal(rounded[1], sin.to(dtype))
    assert torch.equal(cos_sin(positions().int(), FREQUENCIES.double())[0], cos)


def test_once_for_each_tensor_and_key():
    first, second = positions(), positions()
    for _ in range(3):
        found = [ask(first, "main"), ask(first, "compress"), ask(second, "main")]
    assert monitor.rope_table_computations() == 3
    assert ask(first, "main")[0] is found[0][0]
    assert len({id(cos) for cos, _ in found}) == 3


def test_they_carry_no_gradient():
    where, frequencies = positions(), FREQUENCIES.clone().requires_grad_()
    assert not any(table.requires_grad for table in ask(where, frequencies=frequencies))


def test_positions_changed_in_place_are_other_positions():
    where = positions()
    old = ask(where)
    where.add_(100)
    new = ask(where)
    assert torch.equal(new[0], cos_sin(positions(5, 100), FREQUENCIES)[0])
    assert not torch.equal(new[0], old[0])
    where[:, 1:].mul_(2)  # through a view
    assert torch.equal(ask(where)[0], cos_sin(where, FREQUENCIES)[0])
    assert monitor.rope_table_computations() == 3


def test_they_die_with_the_positions():
    where = positions()
    refs = [weakref.ref(table) for table in ask(where)]
    gc.disable()
    try:
        del where
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_an_autograd_graph_holds_no_more_than_it_uses():
    where = positions()
    x = torch.ones(1, 2, 5, 16, requires_grad=True)
    out = apply_rotary(x, *ask(where), interleaved=True)
    cos = weakref.ref(ask(where)[0])
    del where
    assert cos() is not None
    del out
    assert cos() is None


def test_positions_that_torch_keeps_alive_keep_their_tables():
    """A tensor whose Python object is dropped while torch holds it comes back as the same object."""
    where = torch.arange(5)
    view = where[None]
    old = ask(where)[0]
    del where
    gc.collect()
    assert ask(view._base)[0] is old
    assert monitor.rope_table_computations() == 1


def test_a_new_tensor_at_an_old_address_gets_its_own():
    seen = set()
    for first in range(50):
        where = positions(5, first)
        seen.add(id(where))
        assert torch.equal(ask(where)[0], cos_sin(where, FREQUENCIES)[0])
        del where
    assert len(seen) < 50, "addresses were reused, which is what this is about"


def test_copies_and_pickles_take_nothing_along():
    where = positions()
    size = len(pickle.dumps(where))
    ask(where)
    assert len(pickle.dumps(where)) == size
    other = copy.deepcopy(where)
    assert not vars(other)
    ask(other)
    assert monitor.rope_table_computations() == 2
    stream = io.BytesIO()
    torch.save(where, stream)
    assert len(stream.getvalue()) < 4000


def test_many_threads_compute_once():
    where, found, barrier = positions(4096), [], threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        found.append(ask(where)[0])

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monitor.rope_table_computations() == 1
    assert len({id(cos) for cos in found}) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a POSIX system")
def test_a_fork_while_another_thread_holds_the_lock():
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with tables._memory.lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    where = positions()
    child = os.fork()
    if child == 0:
        os._exit(0 if ask(where)[0].shape == (1, 5, 8) else 1)
    _, status = os.waitpid(child, 0)
    release.set()
    thread.join()
    assert status == 0


def test_a_tensor_that_ends_while_the_lock_is_held():
    """Collecting garbage inside a computation ends other positions, and with them their entries."""

    class Cycle:
        def __init__(self) -> None:
            self.me, self.where = self, positions()

    ask(Cycle().where)
    where = positions()

    def compute() -> tuple[Tensor, Tensor]:
        gc.collect()
        return cos_sin(where, FREQUENCIES)

    tables.remembered(where, "main", compute)
    assert len(tables._memory.tables) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_reads_the_same_tables(reentrant):
    where = positions()
    x = torch.randn(1, 2, 5, 16, requires_grad=True)
    seen = []

    def block(x: Tensor) -> Tensor:
        seen.append(ask(where))
        return apply_rotary(x * 1.0, *seen[-1], interleaved=True)

    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2
    assert seen[0][0] is seen[1][0]
    assert monitor.rope_table_computations() == 1


def test_tables_made_without_inference_mode_only():
    where = positions()
    with torch.inference_mode():
        ask(where)
        inside = positions()
        ask(inside)
        ask(inside)
    assert monitor.rope_table_computations() == 3
    assert not ask(where)[0].is_inference()
    ask(inside)  # has no counter of changes, even outside
    assert monitor.rope_table_computations() == 5


def test_nothing_is_remembered_where_it_would_outlive_its_meaning():
    where = positions()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ask(mode.from_tensor(where))
    ask(positions().to("meta"))
    with FlopCounterMode(display=False):
        ask(where)
    make_fx(lambda p: ask(p))(where)
    torch.jit.trace(lambda p: ask(p)[0], (where,), check_trace=False)
    assert not tables._memory.tables
    ask(where)
    graph = make_fx(lambda p: ask(p))(where)  # what is remembered doesn't turn into a constant of the graph either
    other = positions(5, 30)
    assert torch.equal(graph(other)[0], cos_sin(other, FREQUENCIES)[0])


def test_under_compile():
    where = positions()

    def rotation(x: Tensor, where: Tensor) -> Tensor:
        frequencies = tables.fingerprint(FREQUENCIES)
        assert frequencies is None
        return apply_rotary(x, *ask(where), interleaved=True)

    x = torch.randn(1, 2, 5, 16)
    compiled = torch.compile(rotation, fullgraph=True, backend="aot_eager")
    for first in (0, 30):
        where = positions(5, first)
        expected = apply_rotary(x, *cos_sin(where, FREQUENCIES), interleaved=True)
        torch.testing.assert_close(compiled(x, where), expected)
    assert not tables._memory.tables
    assert monitor.rope_table_computations() == 0


def test_fingerprints_follow_the_values():
    frequencies = FREQUENCIES.clone()
    seen = tables.fingerprint(frequencies)
    assert seen == tables.fingerprint(frequencies) == tables.fingerprint(FREQUENCIES.clone())
    frequencies.mul_(2)
    doubled = tables.fingerprint(frequencies)
    assert doubled not in (None, seen)
    frequencies.data = FREQUENCIES.bfloat16()  # as FSDP1's buffer_dtype does; the counter stands still
    assert tables.fingerprint(frequencies) == tables.fingerprint(FREQUENCIES.bfloat16().float()) != doubled
    assert tables.fingerprint(torch.nn.Parameter(frequencies.float())) is None


def test_counting():
    assert monitor.rope_table_computations() == 0
    where = positions()
    ask(where)
    tables.computed(lambda: cos_sin(where, FREQUENCIES))
    assert monitor.rope_table_computations() == 2
    monitor.reset()
    assert monitor.rope_table_computations() == 0
    ask(where)
    assert monitor.rope_table_computations() == 0, "resetting forgets no tables"
