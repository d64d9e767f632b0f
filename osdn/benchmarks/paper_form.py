"""The algorithm of the paper's chunkwise appendix in plain PyTorch, for comparing speed.

Phase 1 loops over the tokens; phase 2 inverts I + tril(B K W', -1) in every chunk of 64 and carries the
state, stored as [V, K], from chunk to chunk.  There is no decay, and the length must be a multiple of the
chunk size.
"""

import torch
from torch import Tensor


def osdn(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, eta: float = 0.003, C: int = 64) -> Tensor:
    B, T, H, K = q.shape
    V = v.shape[-1]
    d = k.new_ones(B, H, K)
    write_keys = []
    for t in range(T):
        k_t, b = k[:, t], beta[:, t, :, None]  # [B, H, K], [B, H, 1]
        write_keys.append(d * k_t)
        k2 = k_t * k_t
        feedback = (1 - b * (d * k2).sum(-1, keepdim=True)) / k2.sum(-1, keepdim=True).clamp_min(1e-6)
        d = (d + eta * b * feedback * k2).clamp(0.5, 2.0)
    w = torch.stack(write_keys, 1)

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, X] -> [T / C, B, H, C, X]
        return x.view(B, T // C, C, H, -1).permute(1, 0, 3, 2, 4)

    q_c, k_c, v_c, w_c, b_c = map(chunks, (q * K**-0.5, k, v, w, beta))
    eye = torch.eye(C)
    S = k.new_zeros(B, H, V, K)
    out = []
    for q_i, k_i, v_i, w_i, b_i in zip(q_c, k_c, v_c, w_c, b_c):
        gram = (b_i * (k_i @ w_i.mT)).tril(-1)
        inverse = torch.linalg.solve_triangular(eye + gram, eye.expand_as(gram), upper=False)
        u = inverse @ (b_i * v_i) - inverse @ (b_i * k_i) @ S.mT
        out.append(q_i @ S.mT + (q_i @ w_i.mT).tril() @ u)
        S = S + u.mT @ w_i
    return torch.stack(out).permute(1, 0, 3, 2, 4).reshape(B, T, H, V)
