"""What the forkserver imports once, so that a world of ranks starts in a fraction of a second.

transformers imports its model files lazily and torch imports its compiler at the first optimizer
step; both cost seconds per process, so they are named here. Nothing in this file may compute: a
process that has run a backward pass can no longer be forked safely.
"""

import gc
import importlib

MODULES = (
    "jsonargparse",
    "lightning",
    "lightning.fabric",
    "lightning.pytorch",
    "lightning.pytorch.cli",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.nn.functional",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "transformers",
    "transformers.loss.loss_utils",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)

for name in MODULES:
    importlib.import_module(name)

# What exists so far is shared by all ranks: keep the collector from touching (copying) its pages.
gc.collect()
gc.freeze()
