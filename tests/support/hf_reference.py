"""transformers' own DeepSeek-V4 as an oracle: float32, eager, one shot, no cache."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def hf_model(folder: str | Path) -> Any:
    """DeepseekV4ForCausalLM of a checkpoint folder (plain storage); every tensor must be found."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations are not ours to judge
        from transformers import DeepseekV4ForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model, info = DeepseekV4ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    wrong = {key: value for key, value in info.items() if value and key != "error_msgs"}
    assert not wrong, wrong
    return model.eval()


@torch.no_grad()
def hf_logits(folder: str | Path, ids: Tensor) -> Tensor:
    """[T, vocab] fp32 of a whole text. ids: [T] int64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits: Tensor = hf_model(folder)(ids[None], use_cache=False).logits[0]
    return logits
