"""The operators among threads and processes: callers at once, and children of a process that used threads."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from osdn.ops import available_backends, online_scaled_delta_rule
from tests.ops.problems import Config, answer, make, threads


@pytest.mark.parametrize("backend", available_backends())
def test_callers_in_several_threads_get_what_one_gets(backend):
    problem = make(Config((130, 0, 67), packed=True, group=2, K=19, V=24, decay="channel", retention="head"))
    call = (answer, online_scaled_delta_rule, problem, backend, torch.float32)
    want = answer(*call[1:])
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(*call) for _ in range(8)]
        for done in calls:
            for name, value in done.result().items():
                assert torch.equal(value, want[name]), name


def _child(x, beta, want, queue):
    torch.set_num_threads(1)
    queue.put(torch.equal(online_scaled_delta_rule(x, x, x, beta, backend="cpu")[0], want))


@pytest.mark.skipif("cpu" not in available_backends(), reason="needs a C++ compiler")
def test_a_forked_child_works_with_one_thread():
    """With more it would wait for threads that exist only in the parent, as all of PyTorch does."""
    x, beta = torch.nn.functional.normalize(torch.randn(1, 512, 4, 64), dim=-1), torch.rand(1, 512, 4)
    with threads(2):
        want = online_scaled_delta_rule(x, x, x, beta, backend="cpu")[0]
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=_child, args=(x, beta, want, queue))
        process.start()
        process.join(60)
        if process.is_alive():
            process.kill()
            pytest.fail("the child hangs")
        assert queue.get()
