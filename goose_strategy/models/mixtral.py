"""Mixtral: Mistral's attention and a mixture of experts, each cut in its width.

Every rank routes every token and computes a share of each expert.
"""

from goose_strategy.models.family import Family
from goose_strategy.tensor_parallel.plan import Style

MIXTRAL = Family(
    name="mixtral",
    own_plan=True,
    islands={"layers.*.self_attn": "hidden_states"},
    rules={
        "layers.*.self_attn.q_proj": Style.COLUMN,
        "layers.*.self_attn.k_proj": Style.COLUMN,
        "layers.*.self_attn.v_proj": Style.COLUMN,
        "layers.*.self_attn.o_proj": Style.ROW,
        "layers.*.mlp.experts": Style.EXPERTS,
    },
)
