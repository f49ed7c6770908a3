"""ops.rope.frequencies: one truth per key, on the CPU in fp32, that nothing handed out can change."""

from __future__ import annotations

import gc
import math
import os
import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_sink_patches.ops.rope.frequencies import Frequencies, copied, frequencies, is_real


def compute() -> dict[str, Tensor]:
    return {"inv_freq": 10000.0 ** -(torch.arange(0, 64, 2) / 64)}


def test_nothing_that_is_handed_out_reaches_the_truth() -> None:
    given = compute()
    truth = Frequencies(given)
    for tensor in (given["inv_freq"], truth.copies()["inv_freq"], truth.copies("cpu")["inv_freq"]):
        tensor.data.fill_(math.nan)
        tensor.fill_(1e30)
        tensor.data = tensor.data.to(torch.bfloat16)
    taken = truth.copies()
    taken.clear()
    found = truth.copies()["inv_freq"]
    assert found.dtype == torch.float32
    assert torch.equal(found, compute()["inv_freq"])


@pytest.mark.parametrize(
    "bad",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, device="meta"),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["bf16", "fp64", "meta", "parameter"],
)
def test_what_holds_no_truth_is_refused(bad: Tensor) -> None:
    with pytest.raises(ValueError, match=r"inv_freq: found a .* expected a plain fp32 tensor"):
        Frequencies({"inv_freq": bad})


def test_a_fake_tensor_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match="found a FakeTensor"):
        Frequencies({"inv_freq": torch.ones(2)})


def test_never_on_meta() -> None:
    with pytest.raises(ValueError, match="meta"):
        Frequencies(compute()).copies("meta")


def test_computed_once_per_key_and_freed_with_its_users() -> None:
    calls = []

    def counted() -> dict[str, Tensor]:
        calls.append(1)
        return compute()

    one = frequencies(("once", 1), counted)
    assert frequencies(("once", 1), counted) is one
    assert frequencies(("once", 2), counted) is not one
    assert len(calls) == 2
    del one
    gc.collect()
    frequencies(("once", 1), counted)
    assert len(calls) == 3


def test_the_callers_defaults_do_not_matter() -> None:
    """Default dtype, default device, inference mode and the random state of whoever asks first."""

    def drawing() -> dict[str, Tensor]:
        torch.rand(3)
        return compute()

    torch.manual_seed(5)
    wanted = torch.rand(2)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            found = frequencies("defaults", drawing)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(2), wanted)
    copy = found.copies()["inv_freq"]
    assert torch.equal(copy, compute()["inv_freq"])
    assert not copy.is_inference()
    copy.requires_grad_().sum().backward()  # may be trained with


def test_a_failing_computation_leaves_no_trace() -> None:
    def fails() -> dict[str, Tensor]:
        raise RuntimeError("no")

    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError, match="no"):
            frequencies("fails", fails)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(frequencies("fails", compute).copies()["inv_freq"], compute()["inv_freq"])


def test_threads_get_one_truth() -> None:
    barrier = threading.Barrier(8)
    found: list[Frequencies] = []

    def ask() -> None:
        barrier.wait()
        found.append(frequencies("threads", compute))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(one) for one in found}) == 1


def test_a_fork_while_another_thread_holds_the_lock() -> None:
    from fsdp_sink_patches.ops.rope import frequencies as module

    kept = frequencies("fork", compute)
    with module._lock:
        child = os.fork()
        if child == 0:
            same = frequencies("fork", compute) is kept and torch.equal(
                frequencies("fork, new", compute).copies()["inv_freq"], compute()["inv_freq"]
            )
            os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_copies_are_of_their_own_memory_and_without_history() -> None:
    source = torch.ones(4, requires_grad=True) * 2
    copy = copied(source, torch.device("cpu"))
    assert copy.data_ptr() != source.data_ptr()
    assert not copy.requires_grad
    assert copied(source, torch.device("cpu"), torch.float64).dtype == torch.float64


def test_is_real() -> None:
    assert is_real(torch.ones(1))
    assert not is_real(None)
    assert not is_real(torch.ones(1, device="meta"))
    with FakeTensorMode():
        assert not is_real(torch.ones(1))
