"""Logits processors of transformers as processors of specdec."""

from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specdec.backend import Logits
from specdec.sampling import Processor

__all__ = ["from_transformers"]


def from_transformers(
    processor: LogitsProcessor | LogitsProcessorList | Callable[..., torch.Tensor],
) -> Processor:
    """A processor for ``SamplingParams`` that calls one of transformers.

    Args:
        processor: Called with ids ``(1, length)`` int64 and scores ``(1, width)`` on the row's
            device. It has to answer by these alone: one that counts its calls, or follows a text
            in a state of its own, can't be asked about drafts.

    Returns:
        ``(ids, row) -> row``. numpy rows give numpy rows, tensors give tensors where they live;
        what the processor writes into its scores leaves the row alone.

    Raises:
        TypeError: ``processor`` is not callable.
    """
    if not callable(processor):
        raise TypeError(f"a logits processor is callable, and {processor!r} isn't: give an object")

    def process(ids: Sequence[int], row: Logits) -> Logits:
        is_tensor = isinstance(row, torch.Tensor)
        scores = row.clone() if is_tensor else torch.tensor(row)
        before = torch.tensor([list(ids)], dtype=torch.int64, device=scores.device)
        (after,) = processor(before, scores[None])
        return after if is_tensor else after.numpy()

    return process
