"""The helper threads of the CPU kernels: several callers at once, more threads than cores, and a forked child."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from edgellm.kernels.cpu import _ops

ROWS, WIDTH, COLUMNS = 4, 512, 3001

FORKED = """
import os, sys, torch
torch.set_num_threads(2)
from edgellm.kernels.cpu.linear import linear
x, weight = torch.randn(2, 512), torch.randn(3001, 512)
def product():
    return linear(x, weight, torch.empty(2, 3001))
before = product()
child = os.fork()
if child == 0:
    ok = all(torch.equal(product(), before) for _ in range(50))
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert torch.equal(product(), before)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def product(x: torch.Tensor, weight: torch.Tensor, num_threads: int) -> torch.Tensor:
    out = torch.empty(len(x), len(weight))
    _ops.skinny_linear(
        x.data_ptr(),
        weight.data_ptr(),
        0,
        out.data_ptr(),
        len(x),
        x.shape[1],
        len(weight),
        False,
        False,
        True,
        num_threads,
    )
    return out


@pytest.mark.parametrize("num_threads", [2, -2, -5, -200])
def test_any_number_of_threads_gives_the_same_bits(num_threads: int) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(COLUMNS, WIDTH)
    alone = product(x, weight, 1)
    for _ in range(30):
        assert torch.equal(product(x, weight, num_threads), alone)


def test_callers_at_the_same_time_do_not_mix_their_work() -> None:
    torch.manual_seed(2)
    jobs = [(torch.randn(ROWS, WIDTH), torch.randn(COLUMNS + idx, WIDTH)) for idx in range(4)]
    expected = [product(x, weight, 1) for x, weight in jobs]
    wrong: list[int] = []

    def drive(idx: int) -> None:
        for _ in range(40):
            if not torch.equal(product(*jobs[idx], -3), expected[idx]):
                wrong.append(idx)

    threads = [threading.Thread(target=drive, args=(idx,)) for idx in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_computes_without_the_parents_helpers() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
