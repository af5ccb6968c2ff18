"""The kernels that requests ask for beside the model's own: a start compiles them too, not the first request."""

from __future__ import annotations

import torch

from edgellm.kernels.cu import advance_rows, copy_pages, logit_edit, logprobs, sample, table_update
from edgellm.kernels.cu.loader import Key
from edgellm.kernels.cu.spec import KernelSpec

LOGITS = torch.float32  # of every model, whatever it computes in
EDITED = torch.float64  # rows of logits that a bias, a grammar or a penalty has changed


def serving_kernels() -> list[tuple[KernelSpec, Key]]:
    """Sampling, changes of logits, log-probabilities, copies of pages, updates of the page table and of step inputs."""
    by_type = (*sample.SPECS, logprobs.SPEC)
    variants = [(spec, (dtype,)) for spec in by_type for dtype in (LOGITS, EDITED)]
    variants.append((logit_edit.EDIT, (LOGITS,)))
    beside = (copy_pages.SPEC, table_update.SPEC, advance_rows.SPEC)
    return variants + [(spec, variant.key) for spec in beside for variant in spec.variants]
