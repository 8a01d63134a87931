"""The same training by ``transformers`` and PyTorch's AdamW: one sequence at a time, one process, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_layouts import CLIP, EPS, LR, TEMPERATURE, WEIGHT_DECAY, batch, objective, scales
from tiny_models import reference_model, stored_tensors, unstacked


def train_reference(folder: Path, steps: int) -> dict[str, Any]:
    """Results of `parity_ranks.train`, but for parameters of a trained folder's names."""
    model = reference_model(folder).train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, eps=EPS, betas=(0.9, 0.999))
    with torch.no_grad():
        first = [answers(model, datum)[0].numpy() for datum in batch()]
    out: dict[str, Any] = {"first": first, "losses": [], "norms": []}
    for _ in range(steps):
        total = 0.0
        for datum in batch():
            mask, weights = torch.from_numpy(scales(datum)), torch.from_numpy(datum.scaled_advantages)
            part = objective(*answers(model, datum), mask, weights)
            part.backward()
            total += float(part.detach())
        out["losses"].append(total)
        out["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        adam.step()
        adam.zero_grad()
    saved = folder.with_name(folder.name + " trained")
    model.save_pretrained(saved)
    return out | {"parameters": unstacked(stored_tensors(saved))}


def answers(model: torch.nn.Module, datum: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies float32 ``[T]``; 0 for the first token and where nothing is trained."""
    ids = torch.from_numpy(datum.token_ids).long()
    logp = (model(ids[None]).logits[0].float() / TEMPERATURE).log_softmax(-1)[:-1]
    trained = torch.from_numpy((datum.loss_mask)[1:].astype(np.float32))
    zero = torch.zeros(1)
    chosen = logp.gather(1, ids[1:, None])[:, 0]
    return torch.cat([zero, chosen * trained]), torch.cat([zero, -(logp.exp() * logp).sum(-1) * trained])
