"""The peers in `osdn bench ops` compute what our operators do."""

import pytest
import torch

from osdn.benchmarks import ops

FORWARD = {"gdn, transformers eager", "gdn, chunkwise", ops.ONNX_RUNTIME}


@pytest.mark.parametrize("peer", sorted(FORWARD))
def test_peers_give_the_outputs_of_the_reference(peer):
    if peer == ops.ONNX_RUNTIME:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
    p = ops.Workload(2, 70, 3, 16, 24)
    found = ops.contenders(p, slow=False)
    want = ops.delta_rule(*p.inputs, log_decay=p.decay, backend="reference")[0]
    torch.testing.assert_close(found[peer](*p.inputs), want, rtol=1e-4, atol=1e-5)


def test_a_decoded_token_of_every_peer_is_ours():
    p = ops.Workload(1, 1, 3, 16, 24)
    q, k, v, beta = p.inputs
    want = ops.delta_rule(q, k, v, beta, log_decay=p.decay, initial_state=p.state)[0]
    for name, call in ops.decoding(p).items():
        if name.startswith("gdn"):
            result = call()
            got = result if isinstance(result, torch.Tensor) else result[0]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
